package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
)

const (
	// Bridge is the node's bridge, made by the first ADD.
	Bridge = "cni0"
	// NetworkName is the conflist's name.
	NetworkName = "pods"
	// annotationsCapability is how a runtime passes the pod's annotations
	// (contract 7).
	annotationsCapability = "io.kubernetes.cri.pod-annotations"

	cniStateDir  = "/var/lib/cni"
	podSubnet4   = "10.88.0.0/16"
	podSubnet6   = "fd00:88::/64"
	podInterface = "eth0"
)

// chain is the CNI configuration of the node, run by libcni as a container
// runtime does.
type chain struct {
	cni  *libcni.CNIConfig
	pods *libcni.NetworkConfigList
}

// newChain is the chain of the options: bridge, then portolan.
func newChain(o Options) (*chain, error) {
	portolan := map[string]any{"type": "portolan", "capabilities": map[string]bool{annotationsCapability: true}}
	maps.Copy(portolan, o.Plugin)
	return newChainOf(o, BridgeConf(), portolan)
}

// BridgeConf is the bridge plugin's entry: a bridge that routes, and addresses
// of both families. Duplicate address detection is off, as it is by default.
func BridgeConf() map[string]any {
	return map[string]any{
		"type": "bridge", "bridge": Bridge, "isGateway": true, "isDefaultGateway": true, "hairpinMode": true,
		"ipam": map[string]any{
			"type":    "host-local",
			"dataDir": filepath.Join(cniStateDir, "networks"),
			"ranges":  [][]map[string]string{{{"subnet": podSubnet4}}, {{"subnet": podSubnet6}}},
		},
	}
}

// newChainOf finds plugins in Bin (portolan) and Bin/cni (the reference plugins).
func newChainOf(o Options, plugins ...map[string]any) (*chain, error) {
	pods, err := confList(NetworkName, o.CNIVersion, plugins...)
	if err != nil {
		return nil, err
	}
	return &chain{
		cni: libcni.NewCNIConfigWithCacheDir([]string{o.Bin, filepath.Join(o.Bin, "cni")}, cniStateDir,
			&invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: appendFile(filepath.Join(o.LogDir, pluginLog))}}),
		pods: pods,
	}, nil
}

// pluginLog is the file of LogDir with what the plugins write to standard error;
// libcni drops it when the plugin fails.
const pluginLog = "plugins.log"

// appendFile is a writer that appends to the file of this name, which is open
// only while it writes.
type appendFile string

// Write implements io.Writer.
func (f appendFile) Write(p []byte) (int, error) {
	file, err := os.OpenFile(string(f), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return 0, fmt.Errorf("open: %w", err)
	}
	n, err := file.Write(p)
	return n, errors.Join(err, file.Close())
}

func confList(name, version string, plugins ...map[string]any) (*libcni.NetworkConfigList, error) {
	conf, err := json.Marshal(map[string]any{"cniVersion": version, "name": name, "plugins": plugins})
	if err != nil {
		return nil, fmt.Errorf("encode the conflist %s: %w", name, err)
	}
	list, err := libcni.ConfListFromBytes(conf)
	if err != nil {
		return nil, fmt.Errorf("read the conflist %s: %w", name, err)
	}
	return list, nil
}

func (c *chain) add(ctx context.Context, rt *libcni.RuntimeConf) (types.Result, error) {
	result, err := c.cni.AddNetworkList(ctx, c.pods, rt)
	if err != nil {
		return nil, fmt.Errorf("ADD to %s: %w", c.pods.Name, err)
	}
	return result, nil
}

func (c *chain) del(ctx context.Context, rt *libcni.RuntimeConf) error {
	if err := c.cni.DelNetworkList(ctx, c.pods, rt); err != nil {
		return fmt.Errorf("DEL from %s: %w", c.pods.Name, err)
	}
	return nil
}

// Check runs CHECK for the pod.
func (n *Node) Check(ctx context.Context, p *Pod) error {
	if err := n.chain.cni.CheckNetworkList(ctx, n.chain.pods, p.runtime); err != nil {
		return fmt.Errorf("CHECK of %s: %w", p.Spec.Name, err)
	}
	return nil
}

// GC runs GC with the pods that are live as the valid attachments.
func (n *Node) GC(ctx context.Context) error {
	args := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{}}
	for _, p := range n.Pods() {
		args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: p.ContainerID, IfName: podInterface})
	}
	if err := n.chain.cni.GCNetworkList(ctx, n.chain.pods, args); err != nil {
		return fmt.Errorf("GC of %s: %w", NetworkName, err)
	}
	return nil
}

// Status runs STATUS: nil when the node can take pods.
func (n *Node) Status(ctx context.Context) error {
	if err := n.chain.cni.GetStatusNetworkList(ctx, n.chain.pods); err != nil {
		return fmt.Errorf("STATUS of %s: %w", NetworkName, err)
	}
	return nil
}
