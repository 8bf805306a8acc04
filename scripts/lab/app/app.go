// Command app is the lab's own test image. Without arguments it only waits (it is
// also the pause container); with ports it echoes HTTP requests on each; with a
// verb it does one small thing that a check needs from inside a pod:
//
//	app get URL...       print each status and body; https URLs get the mounted token and are verified by the mounted CA
//	app cat FILE         print a file, or the names in a folder
//	app write FILE TEXT  write a file
//	app bind FROM TO     bind mount FROM on TO (made if missing)
package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// account is where the kubelet mounts the credentials of the pod's ServiceAccount.
const account = "/var/run/secrets/kubernetes.io/serviceaccount/"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "app:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return serve(nil)
	}
	switch args[0] {
	case "get":
		return get(args[1:], os.Stdout)
	case "cat":
		return cat(args[1:], os.Stdout)
	case "write":
		return write(args[1:])
	case "bind":
		return bind(args[1:])
	default:
		return serve(args)
	}
}

// serve echoes on the ports until a signal ends the program.
func serve(ports []string) error {
	failed := make(chan error, len(ports))
	for _, port := range ports {
		server := http.Server{Addr: ":" + port, Handler: echo(port), ReadHeaderTimeout: time.Minute}
		go func() { failed <- server.ListenAndServe() }()
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	select {
	case err := <-failed:
		return err
	case <-stop:
		return nil
	}
}

func echo(port string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		host, _ := os.Hostname()
		fmt.Fprintf(w, "pod=%s port=%s host=%s\n", host, port, r.Host) //nolint:gosec // plain text for a test
	}
}

func get(urls []string, out io.Writer) error {
	pool := x509.NewCertPool()
	if ca, err := os.ReadFile(account + "ca.crt"); err == nil {
		pool.AppendCertsFromPEM(ca)
	}
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool},
	}}
	for _, url := range urls {
		if err := getOne(&client, url, out); err != nil {
			return err
		}
	}
	return nil
}

func getOne(client *http.Client, url string, out io.Writer) error {
	req, err := http.NewRequest(http.MethodGet, url, nil) //nolint:noctx,gosec // the client has a timeout; a test names the URL
	if err != nil {
		return err
	}
	if req.URL.Scheme == "https" {
		token, err := os.ReadFile(account + "token")
		if err != nil {
			return err
		}
		req.Header.Set("Authorization", "Bearer "+string(token))
	}
	resp, err := client.Do(req) //nolint:gosec // a test names the URL
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	fmt.Fprintln(out, resp.Status)
	_, err = io.Copy(out, resp.Body)
	return err
}

func cat(args []string, out io.Writer) error {
	if len(args) != 1 {
		return errors.New("want: app cat FILE")
	}
	if names, err := os.ReadDir(args[0]); err == nil {
		for _, n := range names {
			fmt.Fprintln(out, n.Name())
		}
		return nil
	}
	data, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	_, err = out.Write(data)
	return err
}

func write(args []string) error {
	if len(args) != 2 {
		return errors.New("want: app write FILE TEXT")
	}
	return os.WriteFile(args[0], []byte(args[1]), 0o644)
}

func bind(args []string) error {
	if len(args) != 2 {
		return errors.New("want: app bind FROM TO")
	}
	if err := os.MkdirAll(args[1], 0o755); err != nil {
		return err
	}
	return unix.Mount(args[0], args[1], "", unix.MS_BIND, "")
}
