#!/usr/bin/env bash
# A real Kubernetes of N nodes on one machine: a node is a set of namespaces (network, mount, pid, host name)
# with its own containerd, kubelet and kube-proxy at their usual paths; the control plane has a network
# namespace of its own. See README.md. Needs root.
# usage: lab.sh up [N] | down | kubectl ARGS... | node I COMMAND... | wire COMMAND... | reboot I | load IMAGE FILE... | size
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
LAB=$(realpath -m "${LAB:-/tmp/portolan-lab}")
export LAB PATH=$root/bin/lab:$root/bin/cni:$PATH
name=$(basename "$LAB")-$(printf %s "$LAB" | sha256sum | head -c 6) # of the network namespaces: labs in other folders can be up as well
hk=$root/bin/lab/hyperkube pki=$LAB/pki
api=10.200.0.254 pods=10.201.0.0/16 services=10.202.0.0/20 dns=10.202.0.10
own=(/etc/cni /opt/cni /var/lib /var/log) # the disk that each node has to itself, kept in $LAB/nodeI

# --- processes ---

die() { echo "lab: $*" >&2; exit 1; }
try() { # COMMAND...: until it succeeds
  for _ in $(seq 300); do
    "$@" > /dev/null 2>&1 && return
    sleep 0.1
  done
  die "gave up waiting for: $*"
}
netns() { echo "/run/netns/$name-$1"; } # I or wire
wire() { nsenter --net="$(netns wire)" "$@"; } # nsenter, not `ip netns exec`: that mounts a fresh /sys, without the cgroups
kubectl_() { wire "$hk" kubectl --kubeconfig "$LAB/kubeconfig" "$@"; }
in_node() { # I COMMAND...: in its current folder
  local p
  p=$(cat "$LAB/pid/node$1" 2> /dev/null) || die "no node $1 is up in $LAB"
  shift
  # pid_for_children, because the process itself is only the parent of the node's process 1
  nsenter -t "$p" -m -n -u --pid="/proc/$p/ns/pid_for_children" --wdns="$PWD" -- "$@"
}
start() { # NAME COMMAND...: in the background
  local log=$LAB/log/$1.log pid=$LAB/pid/$1
  shift
  nohup "$@" < /dev/null >> "$log" 2>&1 &
  echo $! > "$pid"
}
alive() { grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status"; }
stop() { # NAME: kill its process, if it is this lab's. Of a node the child, its process 1: the kernel then kills every process in there
  local file=$LAB/pid/$1 p child
  p=$(cat "$file" 2> /dev/null) || return 0
  if grep -qsxz "LAB=$LAB" "/proc/$p/environ"; then
    read -r child _ < "/proc/$p/task/$p/children" || true
    kill -9 "${child:-$p}" || true
    while alive "$p"; do sleep 0.02; done
  fi
  rm "$file"
}

# --- credentials ---

cert() { # NAME SUBJECT [SANS]: a key and a certificate of the lab's CA
  openssl req -x509 -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj "$2" \
    -config <(printf '[req]\ndistinguished_name=dn\n[dn]\n') -addext "subjectAltName=${3:-DNS:$1}" -keyout "$pki/$1.key" -out "$pki/$1.crt" 2> /dev/null
}
kubeconfig() { # FILE NAME SUBJECT
  cert "$2" "$3"
  cat > "$1" << J
apiVersion: v1
kind: Config
clusters: [{name: lab, cluster: {server: "https://$api:6443", certificate-authority-data: $(base64 -w0 "$pki/ca.crt")}}]
users: [{name: $2, user: {client-certificate-data: $(base64 -w0 "$pki/$2.crt"), client-key-data: $(base64 -w0 "$pki/$2.key")}}]
contexts: [{name: lab, context: {cluster: lab, user: $2}}]
current-context: lab
J
}
authorities() { # the lab's CA, the key that signs tokens, the API server's certificate, the administrator
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -subj /CN=lab-ca -keyout "$pki/ca.key" -out "$pki/ca.crt" 2> /dev/null
  openssl genrsa -out "$pki/sa.key" 2048 2> /dev/null
  local k=kubernetes
  cert apiserver /CN=kube-apiserver "IP:$api,IP:${services%.*}.1,DNS:localhost,DNS:$k,DNS:$k.default,DNS:$k.default.svc,DNS:$k.default.svc.cluster.local"
  kubeconfig "$LAB/kubeconfig" admin /O=system:masters/CN=admin
}

# --- nodes ---

plug() { # I: the node's network namespace, on the wire, with routes to the other nodes' pods
  local i=$1 ns=$name-$1 j
  ip netns add "$ns"
  ip -n "$ns" link set lo up
  ip link add eth0 netns "$ns" type veth peer name "n$i" netns "$name-wire"
  ip -n "$name-wire" link set "n$i" master br0 up
  ip -n "$ns" addr add "10.200.0.$i/24" dev eth0
  ip -n "$ns" link set eth0 up
  ip -n "$ns" route add default dev eth0
  nsenter --net="$(netns "$i")" sysctl -qw net.ipv4.ip_forward=1
  for j in $(seq "$(cat "$LAB/nodes")"); do
    [ "$i" = "$j" ] || ip -n "$ns" route add "10.201.$j.0/24" via "10.200.0.$j"
  done
}
unplug() { # I
  ip -n "$name-wire" link del "n$1"
  ip netns del "$name-$1"
}

create() { # I: the node's disk: plugins, configuration, credentials
  local i=$1 d=$LAB/node$1 o
  for o in "${own[@]}" /cgroup; do mkdir -p "$d$o"; done
  mkdir -p "$d/etc/cni/net.d" "$d/opt/cni/bin" "$d/manifests"
  cp "$root"/bin/cni/{bridge,host-local,loopback,portmap} "$d/opt/cni/bin/"
  cat > "$d/etc/cni/net.d/10-lab.conflist" << J
{"cniVersion":"1.1.0","name":"lab","plugins":[
{"type":"bridge","bridge":"cni0","isGateway":true,"ipMasq":false,"hairpinMode":true,
 "ipam":{"type":"host-local","ranges":[[{"subnet":"10.201.$i.0/24"}]],"routes":[{"dst":"0.0.0.0/0"}]}},
{"type":"portmap","capabilities":{"portMappings":true}}]}
J
  cat > "$d/containerd.toml" << J
version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "registry.k8s.io/pause:3.10.1"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
J
  cat > "$d/kubelet.yaml" << J
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {x509: {clientCAFile: $pki/ca.crt}}
clusterDomain: cluster.local
clusterDNS: [$dns]
resolvConf: ""
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
evictionHard: {memory.available: "50Mi", nodefs.available: "1%", imagefs.available: "1%"}
# Nothing is collected: an image that was loaded cannot be pulled again.
imageGCHighThresholdPercent: 100
staticPodPath: $d/manifests
J
  cat > "$d/proxy.yaml" << J
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clusterCIDR: $pods
clientConnection: {kubeconfig: $pki/proxy.kubeconfig}
nftables: {minSyncPeriod: 100ms}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
J
  kubeconfig "$d/kubelet.kubeconfig" "node$i" "/O=system:nodes/CN=system:node:node$i"
}
weigh_pods() { # N: the part of the processors that a kubelet gives all pods (kubepods): as many shares as its node has
  # processors. Without, all pods of the lab count as much as one thread of what runs beside them, such as the control plane.
  local processors=$(($1 * $(nproc))) g=/sys/fs/cgroup
  if [ -e $g/cgroup.controllers ]; then
    mkdir -p $g/k8s.io
    echo +cpu > $g/cgroup.subtree_control
    echo $((100 * processors)) > $g/k8s.io/cpu.weight
  else
    mkdir -p $g/cpu/k8s.io
    echo $((1024 * processors)) > $g/cpu/k8s.io/cpu.shares
  fi
}
power_on() { # I
  start "node$1" nsenter --net="$(netns "$1")" unshare --mount --uts --pid --fork --mount-proc --kill-child bash "$here/lab.sh" init "$1"
}
power_off() { # I: as pulling the plug. The containers' cgroups are the machine's, so they would stay
  stop "node$1"
  local task
  for task in "$LAB/node$1"/var/lib/containerd/io.containerd.runtime.v2.task/k8s.io/*; do
    rmdir /sys/fs/cgroup/{,*/}k8s.io/"${task##*/}" 2> /dev/null || true
  done
}
file_systems() { # I: what the node has to itself, in its own mount namespace
  local d=$LAB/node$1 o
  umount -lR /run/netns 2> /dev/null || true # copies of the machine's own mounts, which would keep network namespaces alive
  mount --rbind /sys/fs/cgroup "$d/cgroup"
  mount -t sysfs sysfs /sys
  mount --rbind "$d/cgroup" /sys/fs/cgroup
  umount -lR "$d/cgroup"
  mount -t tmpfs -o mode=755 tmpfs /run
  mkdir /run/lock
  for o in "${own[@]}"; do mount --bind "$d$o" "$o"; done
  mount --make-rshared /
}
init() { # I: process 1 of the node
  local i=$1 d=$LAB/node$1 image
  [ $$ = 1 ] || die "init is for lab.sh itself"
  hostname "node$i"
  file_systems "$i"
  containerd -c "$d/containerd.toml" >> "$LAB/log/containerd$i.log" 2>&1 &
  try ctr version
  for image in app coredns; do ctr -n k8s.io images import "$root/bin/lab/$image.tar"; done
  try test -e "$LAB/ready"
  "$hk" kubelet --kubeconfig="$d/kubelet.kubeconfig" --config="$d/kubelet.yaml" --node-ip="10.200.0.$i" >> "$LAB/log/kubelet$i.log" 2>&1 &
  "$hk" kube-proxy --config="$d/proxy.yaml" >> "$LAB/log/proxy$i.log" 2>&1 &
  while true; do # reaps the node's orphans
    wait
    sleep 1
  done
}

# --- control plane ---

switch() { # N: the control plane's network namespace, which is also the nodes' switch
  local i
  ip -n "$name-wire" link set lo up
  ip -n "$name-wire" link add br0 type bridge
  ip -n "$name-wire" addr add "$api/24" dev br0
  ip -n "$name-wire" link set br0 up
  for i in $(seq "$1"); do ip -n "$name-wire" route add "10.201.$i.0/24" via "10.200.0.$i"; done
}
on_wire() { # NAME ARGS...: start a program of the control plane
  start "$1" nsenter --net="$(netns wire)" "$hk" "$@"
}
api_server() {
  on_wire kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address="$api" --advertise-address="$api" \
    --client-ca-file="$pki/ca.crt" --tls-cert-file="$pki/apiserver.crt" --tls-private-key-file="$pki/apiserver.key" \
    --kubelet-client-certificate="$pki/admin.crt" --kubelet-client-key="$pki/admin.key" --kubelet-preferred-address-types=InternalIP \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged --enable-aggregator-routing --service-cluster-ip-range="$services" \
    --service-account-issuer=https://kubernetes.default.svc.cluster.local --service-account-key-file="$pki/sa.key" --service-account-signing-key-file="$pki/sa.key"
}
controllers() {
  on_wire kube-controller-manager --kubeconfig="$pki/controllers.kubeconfig" --leader-elect=false --use-service-account-credentials \
    --kube-api-qps=200 --kube-api-burst=400 --root-ca-file="$pki/ca.crt" --service-account-private-key-file="$pki/sa.key" \
    --cluster-signing-cert-file="$pki/ca.crt" --cluster-signing-key-file="$pki/ca.key"
  on_wire kube-scheduler --kubeconfig="$pki/scheduler.kubeconfig" --leader-elect=false
}
await() { # N: every node Ready and CoreDNS serving
  local i
  for i in $(seq "$1"); do kubectl_ wait --for=create --timeout=60s "node/node$i" > /dev/null; done
  kubectl_ wait --for=condition=Ready --timeout=60s node --all > /dev/null
  kubectl_ -n kube-system rollout status --timeout=60s deployment/coredns > /dev/null
}

# --- verbs ---

preconditions() {
  local o
  for o in /run "${own[@]}"; do # each node has its own of these
    case $LAB/ in "$o"/*) die "LAB=$LAB cannot be in $o" ;; esac
    case $(readlink -f "$hk")/ in "$o"/*) die "the programs cannot be in $o: set XDG_CACHE_HOME and build again" ;; esac
  done
  for o in app.tar coredns.tar hyperkube containerd; do [ -e "$root/bin/lab/$o" ] || die "bin/lab/$o is missing: run make lab-build"; done
  [ -e "$root/bin/cni/portmap" ] || die "bin/cni/portmap is missing: run make lab-build"
}
up() { # [N]
  local n=${1:-1} i
  preconditions
  ip netns add "$name-wire" 2> /dev/null || die "a lab is up in $LAB: take it down first (lab.sh down), or set LAB to another folder"
  trap 'echo "lab: not up: see $LAB/log, then take it down (lab.sh down)" >&2' EXIT
  mkdir -p "$LAB"/{log,pid,pki} "${own[@]}"
  echo "$n" > "$LAB/nodes"
  switch "$n"
  weigh_pods "$n"
  on_wire etcd --data-dir "$LAB/etcd" --unsafe-no-fsync
  authorities
  api_server
  for i in $(seq "$n"); do
    plug "$i"
    create "$i"
    power_on "$i"
  done
  kubeconfig "$pki/proxy.kubeconfig" proxy /CN=system:kube-proxy
  kubeconfig "$pki/controllers.kubeconfig" controllers /CN=system:kube-controller-manager
  kubeconfig "$pki/scheduler.kubeconfig" scheduler /CN=system:kube-scheduler
  try kubectl_ get --raw /readyz
  touch "$LAB/ready"
  controllers
  kubectl_ apply -f "$here/coredns/coredns.yaml" > /dev/null
  await "$n"
  trap - EXIT
  kubectl_ get nodes -o wide
}
reboot_() { # I: power cut and boot: what was in memory (processes, /run, network namespaces) is gone, what was on disk is there
  [ -e "$LAB/pid/node$1" ] || die "no node $1 is up in $LAB"
  power_off "$1"
  unplug "$1"
  plug "$1"
  power_on "$1"
  try in_node "$1" bash -c '< /dev/tcp/127.0.0.1/10248'
}
size() { # how many nodes are up
  cat "$LAB/nodes" 2> /dev/null || die "no lab is up in $LAB"
}
load() { # IMAGE FILE...: an image of these programs, on every node
  local image=$1 archive n i imports=() import
  shift
  n=$(size)
  case ${image%%/*} in *.*) ;; *) image=docker.io/$image ;; esac # as the kubelet completes it
  mkdir -p "$LAB/images"
  archive=$LAB/images/${image//[\/:]/_}.tar
  pack -o "$archive" -name "$image" "$@"
  for i in $(seq "$n"); do
    in_node "$i" ctr -n k8s.io images import "$archive" >> "$LAB/log/import.log" 2>&1 &
    imports+=($!)
  done
  for import in "${imports[@]}"; do wait "$import" || die "cannot import $image: see $LAB/log/import.log"; done
  echo "loaded $image"
}
down() {
  local f ns
  for f in "$LAB"/pid/*; do
    case $f in
      */\*) ;;
      */node*) power_off "${f##*/node}" ;;
      *) stop "${f##*/}" ;;
    esac
  done
  for ns in $(ip netns list | cut -d' ' -f1); do
    case ${ns#"$name-"} in "$ns") ;; wire | [1-9] | [1-9][0-9]) ip netns del "$ns" ;; esac
  done
  rm -rf --one-file-system "$LAB"/{etcd,images,log,pid,pki,node*,ready,kubeconfig}
  rmdir "$LAB" 2> /dev/null || true
  # What the machine itself did not have, unless it is a mount point of another lab.
  ip netns list | grep -q -- '-wire' || rmdir /sys/fs/cgroup/{,*/}k8s.io "${own[@]}" 2> /dev/null || true
}

cmd=${1:-}
shift || true
case $cmd in
  up | down | init | load | size | wire) "$cmd" "$@" ;;
  kubectl) kubectl_ "$@" ;;
  node) in_node "$@" ;;
  reboot) reboot_ "$@" ;;
  *)
    sed -n '2,5p' "$0"
    exit 2
    ;;
esac
