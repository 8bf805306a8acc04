package measure

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Quantile is the value below which the part q of values lies. values must not be
// empty.
func Quantile[T cmp.Ordered](values []T, q float64) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// P50 is the median.
func P50[T cmp.Ordered](values []T) T { return Quantile(values, 0.5) }

// Minus is what a adds to b, round by round: what is slow for a while cancels out.
func Minus[T time.Duration | float64](a, b []T) []T {
	out := make([]T, len(a))
	for i := range a {
		out[i] = a[i] - b[i]
	}
	return out
}

// Variant is one of several things that are compared.
type Variant[T any] struct {
	// Name is for the error.
	Name    string
	Measure func(context.Context) (T, error)
}

// Interleave measures every variant once in each round, in an order that changes,
// and returns the measurements by variant and round. The first round warms up and
// does not count.
func Interleave[T any](ctx context.Context, rounds int, variants ...Variant[T]) ([][]T, error) {
	order := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same order in every run
	out := make([][]T, len(variants))
	for i := range out {
		out[i] = make([]T, rounds)
	}
	for round := -1; round < rounds; round++ {
		for _, i := range order.Perm(len(variants)) {
			got, err := variants[i].Measure(ctx)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", variants[i].Name, err)
			}
			if round >= 0 {
				out[i][round] = got
			}
		}
	}
	return out, nil
}

// Ratio is a/b as a float.
func Ratio[T time.Duration | float64](a, b T) float64 { return float64(a) / float64(b) }

// Millis prints a time in milliseconds.
func Millis(d time.Duration) string {
	if d >= 100*time.Millisecond {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.3g ms", float64(d)/float64(time.Millisecond))
}
