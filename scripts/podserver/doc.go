// Podserver is the small program that runs in the pods of the demo and of the
// end-to-end tests, as their servers and as their clients:
//
//	podserver serve --name payments-1 http:8080 h2:9090,delay=3s tcp:5432
//	podserver get [-n 200 -c 8] http://payments.aether.internal/
//	podserver get -until-eof -rate 50 http://payments.aether.internal/
//	podserver grpc payments.aether.internal:9090
//	podserver tcp payments.aether.internal:5432 hello
//	podserver lookup ghost.aether.internal
//	podserver lookup -every 100ms www.outside.test
//
// Every answer names the pod, the server and the port that gave it, so that a
// request that landed in the wrong place cannot pass for a right one. A client
// prints one JSON document and exits 0 when it got an answer of any kind, 1
// when it got none, 2 when it was called wrongly.
//
// It is not shipped.
package main
