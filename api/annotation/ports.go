package annotation

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/portolan-mesh/portolan/api/port"
)

const (
	// noPorts is the value of the ports key for a pure client.
	noPorts = "none"
	// browserPort is dropped from an authority by HTTP clients, so it can only be
	// told apart when it is the default.
	browserPort = 80

	portRemedy  = `write a number in 1-65535, such as 8080`
	portsRemedy = `write 1-65535, as in "8080,9090=h2"`
)

// ports reads both port keys and returns the set, ascending, and the default.
func (p *parser) ports() ([]port.Port, uint16) {
	failed := len(p.errs)
	explicit := p.defaultPort()
	listed, none := p.portList(explicit)
	if none || len(p.errs) > failed {
		return nil, 0
	}
	chosen := explicit
	switch has8080 := slices.ContainsFunc(listed, func(q port.Port) bool { return q.Number == defaultPort }); {
	case explicit != 0:
	case len(listed) == 0 || has8080:
		chosen = defaultPort
	default:
		chosen = listed[0].Number
	}
	set := listed
	if !slices.ContainsFunc(set, func(q port.Port) bool { return q.Number == chosen }) {
		set = append(set, port.Port{Number: chosen, Protocol: port.HTTP})
	}
	slices.SortFunc(set, func(a, b port.Port) int { return cmp.Compare(a.Number, b.Number) })
	if len(set) > MaxPorts {
		p.fail(KeyPorts, fmt.Sprintf("%d ports, more than %d", len(set), MaxPorts), fmt.Sprintf("serve at most %d ports per pod", MaxPorts))
	}
	for _, q := range set {
		if q.Number == browserPort && q.Number != chosen && q.Protocol.Class() == port.ClassHTTP {
			p.fail(KeyPorts, "80 must be the default HTTP port: clients drop \":80\"", "set "+KeyPort+" to 80, or drop it")
		}
	}
	return set, chosen
}

// defaultPort returns the value of the port key, 0 when it is absent or bad.
func (p *parser) defaultPort() uint16 {
	text, ok := p.annotations[KeyPort]
	if !ok {
		return 0
	}
	n, err := port.ParseNumber(text)
	if err != nil {
		p.fail(KeyPort, numberProblem(err), portRemedy)
		return 0
	}
	if port.Mesh(n) {
		p.failMeshPort(KeyPort, n)
	}
	return n
}

// portList returns the ports of the ports key in its order, duplicates folded,
// or whether it says that there are none.
func (p *parser) portList(explicit uint16) (list []port.Port, none bool) {
	elements := p.elements(KeyPorts)
	if len(elements) == 1 && elements[0] == noPorts {
		if _, ok := p.annotations[KeyPort]; ok {
			p.fail(KeyPorts, fmt.Sprintf("contradicts %s", KeyPort), "remove one of the two keys")
		}
		return nil, true
	}
	protocols := make(map[uint16]port.Protocol, len(elements))
	refused := make(map[string]bool)
	for _, element := range elements {
		one, problem, remedy := parsePort(element)
		if problem != "" {
			if !refused[element] {
				p.fail(KeyPorts, problem, remedy)
			}
			refused[element] = true
			continue
		}
		before, again := protocols[one.Number]
		switch {
		case again && before != one.Protocol:
			p.fail(KeyPorts, fmt.Sprintf("port %d is both %v and %v", one.Number, before, one.Protocol), "list the port once")
		case again:
		default:
			protocols[one.Number] = one.Protocol
			list = append(list, one)
			if port.Mesh(one.Number) && one.Number != explicit {
				p.failMeshPort(KeyPorts, one.Number)
			}
		}
	}
	return list, false
}

// parsePort reads one element of the ports key: "9090" or "9090=h2". A problem
// that is not empty says why it is refused.
func parsePort(element string) (one port.Port, problem, remedy string) {
	if element == noPorts {
		return one, `"none" stands beside ports`, `write "none" alone, or only ports`
	}
	number, protocol, named := strings.Cut(element, "=")
	n, err := port.ParseNumber(number)
	if err != nil {
		return one, numberProblem(err), portsRemedy
	}
	known, ok := port.ParseProtocol(protocol)
	switch {
	case protocol == "udp":
		return one, fmt.Sprintf("port %d: udp is not meshed", n), "leave the port out of the list"
	case !ok || named && protocol == "":
		return one, fmt.Sprintf("port %d: unknown protocol %s", n, quote(protocol, maxEntryText)), "use http, h2 (grpc, http2) or tcp"
	}
	return port.Port{Number: n, Protocol: known}, "", ""
}

func (p *parser) failMeshPort(key string, n uint16) {
	p.fail(key, fmt.Sprintf("port %d belongs to the mesh", n), "serve on another port")
}

// numberProblem says why a number was refused, with its text cut to a bounded length.
func numberProblem(err error) string {
	var number *port.NumberError
	if !errors.As(err, &number) || number.Text == "" {
		return "empty value"
	}
	return quote(number.Text, maxEntryText) + ": " + number.Reason
}
