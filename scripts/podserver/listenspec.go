package main

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/portolan-mesh/portolan/api/port"
)

// listenSpec is one server of the pod: protocol:port[,delay=D][,bind=ADDR].
type listenSpec struct {
	protocol port.Protocol
	number   uint16
	// delay is how long after the start the server begins to listen.
	delay time.Duration
	// bind is the address listened on; the empty string is every address of
	// both families.
	bind string
}

// address is what to give to net.Listen.
func (s listenSpec) address() string {
	return net.JoinHostPort(s.bind, strconv.Itoa(int(s.number)))
}

// parseListenSpec reads one argument of serve.
func parseListenSpec(arg string) (listenSpec, error) {
	head, options, _ := strings.Cut(arg, ",")
	protocol, number, ok := strings.Cut(head, ":")
	if !ok || protocol == "" {
		return listenSpec{}, fmt.Errorf("%q: want protocol:port[,delay=3s][,bind=127.0.0.1]", arg)
	}
	var spec listenSpec
	if spec.protocol, ok = port.ParseProtocol(protocol); !ok {
		return listenSpec{}, fmt.Errorf("%q: unknown protocol %q: want http, h2 or tcp", arg, protocol)
	}
	var err error
	if spec.number, err = port.ParseNumber(number); err != nil {
		return listenSpec{}, fmt.Errorf("%q: %w", arg, err)
	}
	if options == "" {
		return spec, nil
	}
	for option := range strings.SplitSeq(options, ",") {
		key, value, _ := strings.Cut(option, "=")
		switch key {
		case "delay":
			if spec.delay, err = time.ParseDuration(value); err != nil {
				return listenSpec{}, fmt.Errorf("%q: %w", arg, err)
			}
		case "bind":
			spec.bind = value
		default:
			return listenSpec{}, fmt.Errorf("%q: unknown option %q: want delay or bind", arg, key)
		}
	}
	return spec, nil
}
