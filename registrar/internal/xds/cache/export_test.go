package cache

// Entries returns how many keys the cache knows anything of.
func Entries(c *Cache) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for kind := range numKinds {
		n += len(c.entries[kind])
	}
	return n
}
