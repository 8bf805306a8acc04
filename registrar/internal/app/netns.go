package app

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/portolan-mesh/portolan/api/cni/spool"
	cniv1 "github.com/portolan-mesh/portolan/api/cni/v1"
	"github.com/portolan-mesh/portolan/plugins/capture"
	"github.com/portolan-mesh/portolan/registrar/internal/connection"
	"github.com/portolan-mesh/portolan/registrar/internal/model"
	"github.com/portolan-mesh/portolan/registrar/internal/xds/resource"
)

// netnsCapture implements attach.Capture over plugins/capture and the plugin's
// pins.
type netnsCapture struct {
	netnsDir  string
	vipRanges []netip.Prefix
}

// settings returns the capture that a pod must have.
func (c netnsCapture) settings(pod model.Pod, tcpPorts []netip.AddrPort) capture.Config {
	return capture.Config{
		VIPRanges:     c.vipRanges,
		TCPPorts:      tcpPorts,
		ExcludePorts:  pod.ExcludePorts,
		ExcludeRanges: pod.ExcludeRanges,
		DNS:           pod.MeshDNS(),
		IPv6:          pod.IPv6(),
	}
}

// SetTCPPorts implements attach.Capture.
func (c netnsCapture) SetTCPPorts(pod model.Pod, ports []netip.AddrPort) error {
	return capture.SetTCPPorts(pod.Netns, ports)
}

// Ensure implements attach.Capture: what differs from what must be there is
// replaced as a whole.
func (c netnsCapture) Ensure(pod model.Pod, ports []netip.AddrPort) (bool, error) {
	cfg := c.settings(pod, ports)
	err := capture.Verify(pod.Netns, cfg)
	var missing *capture.MissingError
	switch {
	case err == nil:
		return false, nil
	case errors.As(err, &missing):
		return true, capture.Apply(pod.Netns, cfg)
	}
	return false, err
}

// Remove implements attach.Capture.
func (netnsCapture) Remove(pod model.Pod) error { return capture.Remove(pod.Netns) }

// Connected implements attach.Capture.
func (netnsCapture) Connected(pod model.Pod) (bool, error) {
	n, err := connection.Count(pod.Netns, resource.InboundPort)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return n > 0, err
}

// Disconnect implements attach.Capture.
func (netnsCapture) Disconnect(pod model.Pod) error {
	_, err := connection.Reset(pod.Netns, resource.InboundPort)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Gone implements attach.Capture. The pin keeps a network namespace alive that
// the runtime has let go of, so the runtime's path decides; where this process
// cannot see the folder of that path at all, it says nothing (CNI-64).
func (c netnsCapture) Gone(pod model.Pod) bool {
	var pin, runtime unix.Stat_t
	if err := unix.Stat(pod.Netns, &pin); err != nil {
		return true
	}
	if pod.RuntimeNetns == "" || pod.RuntimeNetns == pod.Netns {
		return !isNetns(pod.Netns)
	}
	if err := unix.Stat(pod.RuntimeNetns, &runtime); err != nil {
		_, hidden := os.Stat(filepath.Dir(pod.RuntimeNetns))
		// The folder of /proc/<pid>/ns/net goes with the process: that is an answer.
		return hidden == nil || strings.HasPrefix(pod.RuntimeNetns, "/proc/")
	}
	return pin.Dev != runtime.Dev || pin.Ino != runtime.Ino
}

func isNetns(path string) bool {
	var s unix.Statfs_t
	return unix.Statfs(path, &s) == nil && s.Type == unix.NSFS_MAGIC
}

// Unpin implements attach.Capture: it removes what the plugin's DEL would have.
func (c netnsCapture) Unpin(key model.AttachmentKey) error {
	if err := removePin(filepath.Join(c.netnsDir, key.String())); err != nil {
		return err
	}
	name, err := spool.Name(&cniv1.Attachment{ContainerId: key.ContainerID, Ifname: key.IfName}, spool.Attached)
	if err != nil {
		return err
	}
	return spool.Remove(c.netnsDir, name)
}
