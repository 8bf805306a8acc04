package publisher

import "github.com/portolan-mesh/portolan/registrar/internal/projection"

// Service is one service as status shows it.
type Service = projection.View

// Services returns every known service, without endpoints, in key order.
func (p *Publisher) Services() []Service {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []Service
	for key := range p.engine.Services() {
		if v, ok := p.engine.Shape(key); ok {
			out = append(out, v)
		}
	}
	return out
}

// Asked returns how many names that lead nowhere are remembered (I9).
func (p *Publisher) Asked() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.engine.Asked()
}

// Contested returns how many addresses pods of several nodes claim.
func (p *Publisher) Contested() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.engine.Contested()
}

// Count returns how many services are known.
func (p *Publisher) Count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for range p.engine.Services() {
		n++
	}
	return n
}
