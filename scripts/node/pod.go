package node

import (
	"bufio"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/portolan-mesh/portolan/scripts/sandbox"
)

// PodSpec is a pod to be made.
type PodSpec struct {
	// Name of the pod; the service's name too when no annotation says otherwise.
	Name string
	// Namespace is "default" when empty.
	Namespace string
	// IP is the IPv4 address to ask the chain for, such as one that another pod
	// had; the zero address takes the next one.
	IP netip.Addr
	// Annotations are passed by the runtime capability.
	Annotations map[string]string
	// HideAnnotations makes the runtime one that passes no annotations at all.
	HideAnnotations bool
	// ResolvConf is the content of the pod's /etc/resolv.conf. When empty it
	// names the upstream resolver.
	ResolvConf string
	// Servers are started once the pod is attached: one for each container.
	Servers []Server
}

// Server is one container of a pod: the arguments of `podserver serve`, such as
// "http:8080" and "h2:9090,delay=3s".
type Server struct {
	// Container is the container's name.
	Container string
	// Listen are the servers in it.
	Listen []string
}

// Pod is a pod that is attached.
type Pod struct {
	// Spec is what was asked for.
	Spec PodSpec
	// ContainerID is CNI_CONTAINERID.
	ContainerID string
	// Netns is the path of the network namespace that the runtime made.
	Netns string
	// Result is the chain's.
	Result *types100.Result

	node    *Node
	runtime *libcni.RuntimeConf
	env     []string
	pause   *exec.Cmd

	mu      sync.Mutex
	servers []*Process // guarded by mu
}

// AddPod makes a pod: its network namespace, ADD, the pause process, the
// servers. When ADD fails, DEL is run and the namespace removed, as runtimes
// do, and ADD's error returned; it has a *types.Error of libcni in its tree.
func (n *Node) AddPod(ctx context.Context, spec PodSpec) (*Pod, error) {
	p, err := n.NewPod(ctx, spec)
	if err != nil {
		return nil, err
	}
	if err := p.Add(ctx); err != nil {
		return nil, errors.Join(err, p.Delete(context.WithoutCancel(ctx)))
	}
	if err := p.startProcesses(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("add pod %s: %w", spec.Name, err), p.Delete(context.WithoutCancel(ctx)))
	}
	return p, nil
}

// NewPod makes a pod's network namespace and nothing else. The caller runs Add,
// and Delete whatever became of it; a pod that AddPod did not make has no
// processes, and programs run in its network namespace with the node's files.
func (n *Node) NewPod(_ context.Context, spec PodSpec) (*Pod, error) {
	spec.Namespace = cmp.Or(spec.Namespace, "default")
	spec.ResolvConf = cmp.Or(spec.ResolvConf, "nameserver "+ResolverIP+"\n")
	p := &Pod{
		Spec:        spec,
		ContainerID: randomHex(16),
		Netns:       filepath.Join(netnsDir, "cni-"+randomHex(16)),
		node:        n,
		// Nothing of the harness's environment, such as a proxy, may reach the pod.
		env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/", "POD_NAME=" + spec.Name},
	}
	p.runtime = p.newRuntimeConf()
	return p, newNetns(p.Netns)
}

// Add runs ADD and nothing else: when it fails nothing is undone. The error has
// a *types.Error of libcni in its tree when the plugin gave one.
func (p *Pod) Add(ctx context.Context) error {
	result, err := p.node.chain.add(ctx, p.runtime)
	if err == nil {
		p.Result, err = types100.NewResultFromResult(result)
	}
	if err != nil {
		return fmt.Errorf("add pod %s: %w", p.Spec.Name, err)
	}
	p.node.mu.Lock()
	defer p.node.mu.Unlock()
	p.node.pods = append(p.node.pods, p)
	return nil
}

func (p *Pod) newRuntimeConf() *libcni.RuntimeConf {
	rt := &libcni.RuntimeConf{
		ContainerID: p.ContainerID,
		NetNS:       p.Netns,
		IfName:      podInterface,
		Args: [][2]string{
			{"IgnoreUnknown", "1"},
			{"K8S_POD_NAMESPACE", p.Spec.Namespace},
			{"K8S_POD_NAME", p.Spec.Name},
			{"K8S_POD_INFRA_CONTAINER_ID", p.ContainerID},
			{"K8S_POD_UID", randomHex(16)},
		},
	}
	if p.Spec.IP.IsValid() {
		rt.Args = append(rt.Args, [2]string{"IP", p.Spec.IP.String()})
	}
	if !p.Spec.HideAnnotations {
		annotations := p.Spec.Annotations
		if annotations == nil {
			annotations = map[string]string{}
		}
		rt.CapabilityArgs = map[string]any{annotationsCapability: annotations}
	}
	return rt
}

// startProcesses starts the pause process and the servers, and waits until
// those without a delay listen.
func (p *Pod) startProcesses(ctx context.Context) error {
	if err := p.startPause(ctx); err != nil {
		return err
	}
	for _, server := range p.Spec.Servers {
		if _, err := p.Serve(ctx, server); err != nil {
			return err
		}
	}
	return nil
}

// Serve starts one more container of servers in the pod and waits until those
// without a delay listen.
func (p *Pod) Serve(ctx context.Context, server Server) (*Process, error) {
	argv := append([]string{p.node.Binary("podserver"), "serve", "--name", p.Spec.Name, "--container", server.Container}, server.Listen...)
	process, err := p.Start(cmp.Or(server.Container, "server"), argv...)
	if err != nil {
		return nil, err
	}
	immediate := 0
	for _, listen := range server.Listen {
		if !strings.Contains(listen, "delay=") {
			immediate++
		}
	}
	return process, wait(ctx, "the servers of "+process.Name, func(context.Context) error {
		if got := strings.Count(process.Log(), "msg=listening"); got < immediate {
			return fmt.Errorf("%d of %d listen", got, immediate)
		}
		return nil
	}, process)
}

// startPause starts the process that holds the pod's mount namespace: the
// node's, with the pod's resolv.conf. Mounts of the node still spread to it, so
// that it keeps nothing alive that the node unmounts.
func (p *Pod) startPause(ctx context.Context) error {
	resolvConf := filepath.Join(p.node.options.LogDir, p.Spec.Name+"-"+p.ContainerID+".resolv.conf")
	if err := os.WriteFile(resolvConf, []byte(p.Spec.ResolvConf), 0o644); err != nil {
		return fmt.Errorf("write the pod's resolv.conf: %w", err)
	}
	cmd := exec.Command("nsenter", "--net="+p.Netns, "--", //nolint:noctx // lives until Delete
		"unshare", "--mount", "--propagation", "slave", "--",
		"sh", "-c", `mount --bind "$0" `+sandbox.ResolvConf+` && echo up && exec sleep infinity`, resolvConf)
	cmd.Env = p.env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("start the pause process: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the pause process: %w", err)
	}
	p.pause = cmd
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		return fmt.Errorf("start the pause process: it said %q: %w", line, err)
	}
	return ctx.Err()
}

// PID is the pause process: nsenter -t PID -n -m enters the pod.
func (p *Pod) PID() int { return p.pause.Process.Pid }

// IP is the pod's first address.
func (p *Pod) IP() netip.Addr {
	addr, _ := netip.AddrFromSlice(p.Result.IPs[0].Address.IP)
	return addr.Unmap()
}

// enter is argv as run inside the pod.
func (p *Pod) enter(argv []string) []string {
	if p.pause == nil {
		return append([]string{"nsenter", "--net=" + p.Netns, "--"}, argv...)
	}
	return append([]string{"nsenter", "-t", strconv.Itoa(p.PID()), "-n", "-m", "--"}, argv...)
}

// Exec runs a program inside the pod and returns its standard output. The error
// has the exit status (an *exec.ExitError) and standard error.
func (p *Pod) Exec(ctx context.Context, argv ...string) (string, error) {
	stdout, stderr, err := capture(ctx, p.env, p.enter(argv))
	if err != nil {
		return stdout, fmt.Errorf("%s in pod %s: %w: %s", filepath.Base(argv[0]), p.Spec.Name, err, stderr)
	}
	return stdout, nil
}

// Podserver runs a client command of podserver inside the pod.
func (p *Pod) Podserver(ctx context.Context, args ...string) (string, error) {
	return p.Exec(ctx, append([]string{p.node.Binary("podserver")}, args...)...)
}

// Start starts a program inside the pod that ends at the latest with the pod.
// Its log is named after the pod and the name given.
func (p *Pod) Start(name string, argv ...string) (*Process, error) {
	process := p.node.newProcess(p.Spec.Name+"-"+name, p.enter(argv), p.env)
	if err := process.Start(); err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.servers = append(p.servers, process)
	return process, nil
}

// Servers are the programs started inside, in order.
func (p *Pod) Servers() []*Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.servers)
}

// Del runs DEL and nothing else; it may be run again.
func (p *Pod) Del(ctx context.Context) error {
	if err := p.node.chain.del(ctx, p.runtime); err != nil {
		return fmt.Errorf("delete pod %s: %w", p.Spec.Name, err)
	}
	return nil
}

// Delete ends the pod's processes, runs DEL and removes the network namespace.
// It does all of it whatever fails on the way.
func (p *Pod) Delete(ctx context.Context) error {
	var errs []error
	for _, process := range p.Servers() {
		errs = append(errs, process.Stop(ctx))
	}
	errs = append(errs, p.killPause(), p.Del(ctx), removeNetns(p.Netns))
	p.node.forget(p)
	return errors.Join(errs...)
}

// Vanish ends the pod as a crash of the runtime would: its processes are killed
// and its network namespace removed, without DEL.
func (p *Pod) Vanish() error {
	var errs []error
	for _, process := range p.Servers() {
		errs = append(errs, process.Kill())
	}
	errs = append(errs, p.killPause(), removeNetns(p.Netns))
	p.node.forget(p)
	return errors.Join(errs...)
}

func (p *Pod) killPause() error {
	if p.pause == nil {
		return nil
	}
	if err := p.pause.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end the pause process of %s: %w", p.Spec.Name, err)
	}
	_ = p.pause.Wait() // its error is the signal
	return nil
}

// CNIError is the code and the text of the CNI error in err's tree; 0 and "" when
// there is none.
func CNIError(err error) (code uint, text string) {
	if cniErr, ok := errors.AsType[*types.Error](err); ok {
		return cniErr.Code, cniErr.Error()
	}
	return 0, ""
}

func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return fmt.Sprintf("%x", b)
}
