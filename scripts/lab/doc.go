// Package lab runs a lab (lab.sh, see README.md) for a program of this module: it
// brings one up with the mesh's images, starts the program again inside it, reaches
// the nodes from there and takes the lab down.
package lab
