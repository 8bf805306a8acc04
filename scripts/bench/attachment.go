package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/scripts/node"
)

const annotationsCapability = "io.kubernetes.cri.pod-annotations"

// network is a chain of plugins behind the node's bridge, run by libcni.
type network struct {
	cni  *libcni.CNIConfig
	list *libcni.NetworkConfigList
}

// newNetwork is [bridge, plugins...]. All networks have the node's name, so that
// host-local gives each address once.
func newNetwork(bin string, plugins ...map[string]any) (*network, error) {
	conf, err := json.Marshal(map[string]any{
		"cniVersion": "1.1.0", "name": node.NetworkName, "plugins": append([]map[string]any{node.BridgeConf()}, plugins...),
	})
	if err != nil {
		return nil, fmt.Errorf("encode a conflist: %w", err)
	}
	list, err := libcni.NetworkConfFromBytes(conf)
	if err != nil {
		return nil, fmt.Errorf("read a conflist: %w", err)
	}
	stderr, err := os.OpenFile(filepath.Join(logDir, "plugins-stderr.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the plugins' log: %w", err)
	}
	exec := &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: stderr}}
	return &network{cni: libcni.NewCNIConfigWithCacheDir([]string{bin, filepath.Join(bin, "cni")}, logDir, exec), list: list}, nil
}

// portolan is the product's entry in a conflist.
func portolan() map[string]any {
	return map[string]any{"type": "portolan", "capabilities": map[string]bool{annotationsCapability: true}}
}

// noop is the reference plugin that hands on what it was given: what any plugin
// more in the chain costs.
func noop() map[string]any {
	return map[string]any{"type": "sample", "anotherAwesomeArg": "x"}
}

// attachment is a network namespace that may be attached to a network. Nothing but
// ADD and DEL runs for it, so that only they are measured.
type attachment struct {
	network *network
	runtime *libcni.RuntimeConf
	result  *types100.Result
}

// newAttachment makes the network namespace of a pod.
func newAttachment(n *network, pod string, annotations map[string]string) (*attachment, error) {
	id := strings.ToLower(rand.Text())
	path := "/run/netns/bench-" + id
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	fresh, err := ns.TempNetNS()
	if err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	defer func() { _ = fresh.Close() }()
	err = fresh.Do(func(ns.NetNS) error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetUp(lo), unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""))
	})
	if err != nil {
		return nil, fmt.Errorf("prepare a network namespace: %w", err)
	}
	return &attachment{network: n, runtime: &libcni.RuntimeConf{
		ContainerID: id, NetNS: path, IfName: "eth0",
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", "default"},
			{"K8S_POD_NAME", pod},
			{"K8S_POD_INFRA_CONTAINER_ID", id},
			{"K8S_POD_UID", id},
		},
		CapabilityArgs: map[string]any{annotationsCapability: annotations},
	}}, nil
}

// add runs ADD and returns how long it took.
func (a *attachment) add(ctx context.Context) (time.Duration, error) {
	begin := time.Now()
	result, err := a.network.cni.AddNetworkList(ctx, a.network.list, a.runtime)
	took := time.Since(begin)
	if err != nil {
		return 0, fmt.Errorf("ADD: %w", err)
	}
	if a.result, err = types100.NewResultFromResult(result); err != nil {
		return 0, fmt.Errorf("read ADD's result: %w", err)
	}
	return took, nil
}

// del runs DEL and returns how long it took.
func (a *attachment) del(ctx context.Context) (time.Duration, error) {
	begin := time.Now()
	if err := a.network.cni.DelNetworkList(ctx, a.network.list, a.runtime); err != nil {
		return 0, fmt.Errorf("DEL: %w", err)
	}
	return time.Since(begin), nil
}

// remove removes the network namespace, after a DEL.
func (a *attachment) remove() error {
	return errors.Join(unix.Unmount(a.runtime.NetNS, unix.MNT_DETACH), os.Remove(a.runtime.NetNS))
}

// within calls f on a thread inside the network namespace at path.
func within[T any](path string, f func() (T, error)) (T, error) {
	var out T
	err := ns.WithNetNSPath(path, func(ns.NetNS) (err error) {
		out, err = f()
		return err
	})
	return out, err
}
