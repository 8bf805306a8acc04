// Package measure is what the programs that measure have in common: samples, the
// rows of their tables and the tables in scripts/bench/README.md.
package measure
