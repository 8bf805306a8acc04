package dns

import (
	dnsv1 "github.com/portolan-mesh/portolan/api/dns/v1"
	"github.com/portolan-mesh/portolan/registrar/internal/dns/table"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

const (
	// chunkNames and chunkPods are half of what dns.proto allows in a message, so
	// that one with both stays far below its size.
	chunkNames = dnsv1.MaxChunkNames / 2
	chunkPods  = dnsv1.MaxChunkPods / 2
)

// revisionBuilder spreads a revision over as many messages as it needs.
type revisionBuilder struct {
	session, revision uint64
	full              bool
	chunks            []*dnsv1.SyncRequest
	names, pods       int
}

func (b *revisionBuilder) last() *dnsv1.SyncRequest { return b.chunks[len(b.chunks)-1] }

// next begins another chunk.
func (b *revisionBuilder) next() {
	if len(b.chunks) > 0 {
		b.last().More = true
	}
	b.chunks = append(b.chunks, &dnsv1.SyncRequest{Session: b.session, Revision: b.revision, Full: b.full})
	b.names, b.pods = 0, 0
}

func (b *revisionBuilder) roomForName() *dnsv1.SyncRequest {
	if b.names == chunkNames {
		b.next()
	}
	b.names++
	return b.last()
}

func (b *revisionBuilder) roomForPod() *dnsv1.SyncRequest {
	if b.pods == chunkPods {
		b.next()
	}
	b.pods++
	return b.last()
}

func (b *revisionBuilder) setName(n *dnsv1.Name) {
	m := b.roomForName()
	m.SetNames = append(m.SetNames, n)
}

func (b *revisionBuilder) removeName(n string) {
	m := b.roomForName()
	m.RemoveNames = append(m.RemoveNames, n)
}

func (b *revisionBuilder) setPod(p *dnsv1.Pod) {
	m := b.roomForPod()
	m.SetPods = append(m.SetPods, p)
}

func (b *revisionBuilder) removePod(k model.AttachmentKey) {
	m := b.roomForPod()
	m.RemovePods = append(m.RemovePods, table.KeyMessage(k))
}
