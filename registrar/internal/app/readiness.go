package app

import (
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/portolan-mesh/portolan/registrar/internal/attach"
	"github.com/portolan-mesh/portolan/registrar/internal/listen"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

type listenTables struct {
	mu   sync.Mutex
	pods map[model.AttachmentKey]chan struct{}
	wg   map[model.AttachmentKey]*sync.WaitGroup
}

func (l *listenTables) Watch(pod model.Pod, fn func(attach.PortState)) error {
	t, err := listen.Open(pod.Netns)
	if err != nil {
		return err
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	l.mu.Lock()
	l.pods[pod.Key] = stop
	l.wg[pod.Key] = &wg
	l.mu.Unlock()
	wg.Go(func() {
		defer t.Close()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		var last string
		for {
			s, err := t.Read()
			if err == nil {
				st := attach.PortState{Inbound: s.Everywhere(15008), OutboundHTTP: s.Bound(netip.MustParseAddrPort("127.0.0.1:15001")), OutboundTCP: s.Bound(netip.MustParseAddrPort("127.0.0.1:15002"))}
				for _, p := range pod.Ports {
					if s.Listens(p.Number) {
						st.Listening = append(st.Listening, p.Number)
					}
				}
				if d := stateText(st); d != last {
					last = d
					fn(st)
				}
			}
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	})
	return nil
}

func (l *listenTables) Forget(key model.AttachmentKey) {
	l.mu.Lock()
	stop, wg := l.pods[key], l.wg[key]
	delete(l.pods, key)
	delete(l.wg, key)
	l.mu.Unlock()
	if stop != nil {
		close(stop)
		wg.Wait()
	}
}

func stateText(s attach.PortState) string { return fmt.Sprint(s) }
