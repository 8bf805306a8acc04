// Package traffic compares how requests go from pod to pod: direct, through the mesh, and
// through Envoys with a hand-written configuration of the same hops.
package traffic

import (
	"encoding/json"
	"fmt"
	"strconv"
	"time"
)

// loadTime is how long one load lasts.
const loadTime = 700 * time.Millisecond

// load is what fortio measured, and what the Envoys spent on each request.
type load struct {
	p50      time.Duration
	qps      float64
	requests int64
	envoy    float64 // microseconds of processor time
}

// fortioLoad are the arguments of fortio that send as fast as answers come.
func fortioLoad(connections int, url string) []string {
	return []string{
		"load", "-quiet", "-loglevel", "error", "-c", strconv.Itoa(connections), "-qps", "0",
		"-t", loadTime.String(), "-r", "0.000005", "-p", "50", "-json", "-", url,
	}
}

// FortioServer are the arguments of fortio that serve HTTP on port 8080 and nothing else.
func FortioServer() []string {
	return []string{
		"server", "-http-port", "8080", "-grpc-port", "disabled", "-redirect-port", "disabled",
		"-tcp-port", "disabled", "-udp-port", "disabled", "-loglevel", "error",
	}
}

// readLoad reads fortio's report; an answer that is not 200 is an error.
func readLoad(report string) (load, error) {
	var r struct {
		ActualQPS         float64
		RetCodes          map[string]int64
		DurationHistogram struct {
			Percentiles []struct{ Value float64 }
		}
	}
	if err := json.Unmarshal([]byte(report), &r); err != nil {
		return load{}, fmt.Errorf("read fortio's report: %w", err)
	}
	if len(r.DurationHistogram.Percentiles) == 0 || len(r.RetCodes) != 1 || r.RetCodes["200"] == 0 {
		return load{}, fmt.Errorf("fortio's answers were %v", r.RetCodes)
	}
	return load{
		p50: time.Duration(r.DurationHistogram.Percentiles[0].Value * float64(time.Second)),
		qps: r.ActualQPS, requests: r.RetCodes["200"],
	}, nil
}
