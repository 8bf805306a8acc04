// Package attach owns which pods are attached to this node and how far each of
// them is: decided, stored, proven, published, leaving.
//
// podserver calls it for every CNI request; at start it loads what is stored,
// adopts what the plugin left beside its pins, and replays the spool. It tells
// the publisher which listeners to build, the mesh DNS which netns to serve and
// the registry what the pod offers. It never builds an Envoy resource and never
// enters a netns itself.
//
// It says what is wrong with a pod to the pod's owner, by the Reporter, and to the status:
// with what it asks for, with taking it in, and with ports on which nobody listens.
//
// Everything is keyed by (container ID, interface), never by a pod's name, so a
// late DEL of an old sandbox cannot touch a newer one (CNI-D2, CNI-22).
package attach
