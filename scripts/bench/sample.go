package main

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// quantile is the value below which the part q of values lies. values must not be
// empty.
func quantile[T cmp.Ordered](values []T, q float64) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

func p50[T cmp.Ordered](values []T) T { return quantile(values, 0.5) }

// minus is what a adds to b, round by round: what is slow for a while cancels out.
func minus[T time.Duration | float64](a, b []T) []T {
	out := make([]T, len(a))
	for i := range a {
		out[i] = a[i] - b[i]
	}
	return out
}

// variant is one of several things that are compared.
type variant[T any] struct {
	name    string
	measure func(context.Context) (T, error)
}

// interleave measures every variant once in each round, in an order that changes,
// and returns the measurements by variant and round. The first round warms up and
// does not count.
func interleave[T any](ctx context.Context, rounds int, variants ...variant[T]) ([][]T, error) {
	order := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same order in every run
	out := make([][]T, len(variants))
	for i := range out {
		out[i] = make([]T, rounds)
	}
	for round := -1; round < rounds; round++ {
		for _, i := range order.Perm(len(variants)) {
			got, err := variants[i].measure(ctx)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", variants[i].name, err)
			}
			if round >= 0 {
				out[i][round] = got
			}
		}
	}
	return out, nil
}

// ratio is a/b as a float.
func ratio[T time.Duration | float64](a, b T) float64 { return float64(a) / float64(b) }

// millis prints a time in milliseconds.
func millis(d time.Duration) string {
	if d >= 100*time.Millisecond {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.3g ms", float64(d)/float64(time.Millisecond))
}
