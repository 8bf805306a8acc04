// Package listen reads the kernel's listen table of a network namespace: which
// TCP sockets listen there, and on what (contract 4.3). It asks by sock_diag, for
// the listen state only, so that the cost does not depend on connections, and
// nothing is ever dialled.
//
// A Table is one netlink socket that was opened inside the namespace; reading it
// needs no thread to enter the namespace again. Such a socket keeps the namespace
// alive in the kernel, with its interfaces, even after every path to it is gone:
// whoever opens a Table must close it when the pod goes.
package listen
