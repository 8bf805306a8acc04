package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/portolan-mesh/portolan/scripts/answer"
)

// getCommand sends requests and counts the answers.
func getCommand(flags *flag.FlagSet) func(context.Context, []string, io.Writer) error {
	requests := flags.Int("n", 1, "number of requests for each URL")
	workers := flags.Int("c", 1, "number of requests at the same time")
	duration := flags.Duration("duration", 0, "send for this long instead of -n requests")
	untilEOF := flags.Bool("until-eof", false, "send until standard input ends instead of -n requests")
	rate := flags.Float64("rate", 0, "begin so many requests a second, as far as the workers get; 0 is no limit")
	useH2 := flags.Bool("h2", false, "HTTP/2 with prior knowledge")
	keepAlive := flags.Bool("keepalive", true, "reuse connections")
	authority := flags.String("authority", "", "authority to send in place of the URL's")
	dial := flags.String("dial", "", "address (host:port) to connect to in place of the URL's")
	timeout := flags.Duration("timeout", 10*time.Second, "time for each request")
	return func(ctx context.Context, urls []string, stdout io.Writer) error {
		if len(urls) == 0 || *workers < 1 {
			return usageError{errors.New("get: want at least one URL and one worker")}
		}
		l := load{
			client:    newClient(*useH2, *keepAlive, *timeout),
			urls:      urls,
			total:     int64(*requests * len(urls)),
			authority: *authority,
			dial:      *dial,
		}
		if *rate > 0 {
			ticker := time.NewTicker(time.Duration(float64(time.Second) / *rate))
			defer ticker.Stop()
			l.tick = ticker.C
		}
		if *duration > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, *duration)
			defer cancel()
			l.total = 1<<63 - 1
		}
		if *untilEOF {
			var cancel context.CancelFunc
			ctx, cancel = context.WithCancel(ctx)
			defer cancel()
			go func() {
				_, _ = io.Copy(io.Discard, os.Stdin)
				cancel()
			}()
			l.total = 1<<63 - 1
		}
		return printJSON(stdout, l.run(ctx, *workers))
	}
}

func newClient(useH2, keepAlive bool, timeout time.Duration) *http.Client {
	transport := &http.Transport{DisableKeepAlives: !keepAlive, MaxIdleConnsPerHost: 1000}
	if useH2 {
		transport.Protocols = new(http.Protocols)
		transport.Protocols.SetUnencryptedHTTP2(true)
	}
	return &http.Client{
		Timeout:       timeout,
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// load is one run of get.
type load struct {
	client    *http.Client
	urls      []string
	authority string
	dial      string
	total     int64
	tick      <-chan time.Time // one request for each; nil: no limit

	next  atomic.Int64
	mu    sync.Mutex
	tally answer.Tally // guarded by mu
}

func (l *load) run(ctx context.Context, workers int) answer.Tally {
	l.tally.Answers, l.tally.Callers = make(map[string]int), make(map[string]int)
	var group sync.WaitGroup
	for range workers {
		group.Go(func() {
			for l.await(ctx) {
				i := l.next.Add(1) - 1
				if i >= l.total {
					return
				}
				begin := time.Now()
				// A request that was begun is finished, so that the end of the run
				// does not look like a failure.
				got, caller := l.get(context.WithoutCancel(ctx), l.urls[i%int64(len(l.urls))])
				l.count(got, caller, time.Since(begin))
			}
		})
	}
	group.Wait()
	return l.tally
}

// await waits until the next request may begin; false when there is none any more.
func (l *load) await(ctx context.Context) bool {
	if l.tick == nil {
		return ctx.Err() == nil
	}
	select {
	case <-ctx.Done():
		return false
	case <-l.tick:
		return true
	}
}

func (l *load) count(got, caller string, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tally.Requests++
	l.tally.Answers[got]++
	if caller != "" {
		l.tally.Callers[caller]++
	}
	l.tally.MaxMillis = max(l.tally.MaxMillis, took.Milliseconds())
}

// get sends one request and says what came back, and who the pod that answered took
// the caller for.
func (l *load) get(ctx context.Context, url string) (got, caller string) {
	failed := func(err error) (string, string) { return "error: " + err.Error(), "" }
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return failed(err)
	}
	if l.dial != "" {
		// The connections are those of one address, whatever the authority.
		req.URL.Host = l.dial
	}
	if l.authority != "" {
		req.Host = l.authority
	}
	resp, err := l.client.Do(req)
	if err != nil {
		return failed(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return failed(err)
	}
	code := strconv.Itoa(resp.StatusCode)
	var from answer.Echo
	if json.Unmarshal(body, &from) != nil || from.Pod == "" {
		return code, ""
	}
	return code + " " + from.String(), from.XFCC
}
