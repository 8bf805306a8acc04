#!/usr/bin/env bash
# Checks the lab itself, on a running lab of two or more nodes whose last node it reboots: prints one line a
# check and ends at the first that fails. usage: check.sh [down]   (LAB as for lab.sh; down: also takes the
# lab down and checks that nothing of it is left)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
LAB=$(realpath -m "${LAB:-/tmp/portolan-lab}")
export LAB
lab=$here/lab.sh
image="docker.io/library/echo:dev"

k() { "$lab" kubectl "$@"; }
ok() { printf 'ok %-34s %s\n' "$1" "${2:-}"; }
fail() {
  echo "FAILED $1: ${2:-}"
  exit 1
}
has() { # CHECK TEXT PART [SHOWN]
  case $2 in
    *"$3"*) ok "$1" "$(head -1 <<< "${4:-$2}" | cut -c1-150)" ;;
    *) fail "$1" "$2" ;;
  esac
}
soon() { # COMMAND...: kube-proxy needs a moment to learn of a Service
  for _ in $(seq 50); do
    "$@" > /dev/null 2>&1 && break
    sleep 0.1
  done
  "$@" 2>&1
}
names() { # SELECTOR [NODE]: of pods
  k -n check get pods -l "$1" ${2:+--field-selector "spec.nodeName=$2"} -o jsonpath='{range .items[*]}{.metadata.name}{"\n"}{end}'
}
first() { # SELECTOR [NODE]: reads all of the names, or their writer would fail
  names "$@" | sed -n 1p
}
app() { # POD ARGS...: the test program inside a pod
  k -n check exec "$1" -- app "${@:2}" 2>&1
}
agent() { # I ARGS...: the test program in node I's agent
  local pod
  pod=$(names app=agent "node$1")
  app "$pod" "${@:2}"
}
echo_ip() { k -n check get service echo -o jsonpath='{.spec.clusterIP}'; }

workload() { # four echo pods behind a Service, and a privileged agent on each node
  k delete namespace check --ignore-not-found > /dev/null
  k create namespace check > /dev/null
  k apply -n check -f - > /dev/null << J
apiVersion: v1
kind: ServiceAccount
metadata: {name: reader}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: view}
subjects: [{kind: ServiceAccount, name: reader, namespace: check}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: echo}
spec:
  replicas: 4
  selector: {matchLabels: {app: echo}}
  template:
    metadata: {labels: {app: echo}}
    spec:
      serviceAccountName: reader
      topologySpreadConstraints: [{maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app: echo}}}]
      containers: [{name: echo, image: "$image", imagePullPolicy: Never, args: ["8080"]}]
---
apiVersion: v1
kind: Service
metadata: {name: echo}
spec: {selector: {app: echo}, ports: [{port: 80, targetPort: 8080}]}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: agent}
spec:
  selector: {matchLabels: {app: agent}}
  template:
    metadata: {labels: {app: agent}}
    spec:
      serviceAccountName: reader
      hostNetwork: true
      dnsPolicy: ClusterFirstWithHostNet
      containers:
      - name: agent
        image: $image
        imagePullPolicy: Never
        securityContext: {privileged: true}
        volumeMounts:
        - {name: run, mountPath: /host/run}
        - {name: netd, mountPath: /host/net.d}
        - {name: netns, mountPath: /host/netns, mountPropagation: HostToContainer}
        - {name: both, mountPath: /host/both, mountPropagation: Bidirectional}
      volumes:
      - {name: run, hostPath: {path: /run}}
      - {name: netd, hostPath: {path: /etc/cni/net.d}}
      - {name: netns, hostPath: {path: /run/netns}}
      - {name: both, hostPath: {path: /run/both, type: DirectoryOrCreate}}
J
  k -n check rollout status deployment/echo --timeout=60s > /dev/null
  k -n check rollout status daemonset/agent --timeout=60s > /dev/null
  ok "pods by node" "$(k -n check get pods -l app=echo -o jsonpath='{range .items[*]}{.spec.nodeName} {end}')"
}

services() { # NODES: every pod answers by the ClusterIP, from nodes and pods; pods by address across nodes
  local i ip from to seen urls
  ip=$(echo_ip)
  mapfile -t urls < <(for _ in $(seq 40); do echo "http://$ip/"; done)
  for i in $(seq "$1"); do
    has "ClusterIP from node $i" "$(soon "$lab" node "$i" curl -sS -m 5 "http://$ip/")" "pod=echo-"
    from=$(first app=echo "node$i")
    seen=$(app "$from" get "${urls[@]}" | grep -o 'pod=[^ ]*' | sort -u)
    [ "$(wc -l <<< "$seen")" = 4 ] || fail "ClusterIP from a pod on node $i" "$seen"
    ok "ClusterIP from a pod on node $i" "all 4 pods answered"
    to=$(first app=echo "node$((i % $1 + 1))")
    has "pod to pod, from node $i to the next" "$(app "$from" get "http://$(k -n check get pod "$to" -o jsonpath='{.status.podIP}'):8080/" | tail -1)" "pod=$to"
  done
}

cluster() { # DNS, in-cluster clients, the way from the API server
  local pod
  pod=$(first app=echo)
  has "DNS: short name" "$(app "$pod" get http://echo/)" "pod=echo-"
  has "DNS: full name" "$(app "$pod" get http://echo.check.svc.cluster.local/)" "pod=echo-"
  has "in-cluster list of pods" "$(app "$pod" get https://kubernetes.default.svc/api/v1/namespaces/check/pods)" '"kind":"PodList"'
  has "in-cluster, not allowed" "$(app "$pod" get https://kubernetes.default.svc/api/v1/nodes)" '403 Forbidden'
  has "API server to a Service" "$(k get --raw /api/v1/namespaces/check/services/echo:80/proxy/)" "pod=echo-"
  has "kubectl logs" "$(k -n kube-system logs deployment/coredns | grep CoreDNS-)" "CoreDNS-"
}

identities() { # the node claim of a bound token; a kubelet's rights end at its own node
  local pod token who server kubelet=$LAB/node1/kubelet.kubeconfig
  pod=$(first app=echo)
  token=$(k -n check create token reader --bound-object-kind Pod --bound-object-name "$pod")
  server=$(k config view -o jsonpath='{.clusters[0].cluster.server}')
  who=$(k --kubeconfig /dev/null --server "$server" --insecure-skip-tls-verify --token "$token" auth whoami -o json | tr -d ' \n')
  has "API sees the node claim" "$who" 'authentication.kubernetes.io/node-name":["node' "$(grep -o 'authentication.kubernetes.io/node-name":\[[^]]*' <<< "$who")"
  has "kubelet of node1 on its own node" "$(k --kubeconfig "$kubelet" annotate node node1 check=$RANDOM --overwrite 2>&1)" "annotated"
  has "kubelet of node1 on node2" "$(k --kubeconfig "$kubelet" annotate node node2 check=1 --overwrite 2>&1 || true)" "forbidden"
}

separation() { # NODES: own files, networks and mounts of each node
  local i mounts
  for i in $(seq "$1"); do
    agent "$i" write /host/run/who "node$i"
    agent "$i" write /host/net.d/99-check.txt "node$i"
  done
  for i in $(seq "$1"); do
    has "own files, node $i" "$("$lab" node "$i" cat /run/who /etc/cni/net.d/99-check.txt)" "node${i}node$i"
    has "hostNetwork, node $i" "$(agent "$i" cat /proc/net/fib_trie)" "10.200.0.$i"
    has "hostNetwork to ClusterIP by name" "$(agent "$i" get http://echo.check.svc.cluster.local/)" "pod=echo-"
    "$lab" node "$i" sh -c 'touch /run/netns/check && mount --bind /proc/1/ns/net /run/netns/check'
    mounts=$(agent "$i" cat /proc/self/mountinfo)
    has "HostToContainer, node $i" "$mounts" " /host/netns/check " "$(grep -o 'net:.*/host/netns/check .*' <<< "$mounts")"
    agent "$i" bind /etc /host/both/etc
    has "Bidirectional, node $i" "$("$lab" node "$i" cat /proc/self/mountinfo)" " /run/both/etc " "$("$lab" node "$i" grep -o '/run/both/etc .*' /proc/self/mountinfo)"
    "$lab" node "$i" sh -c 'umount /run/netns/check /run/both/etc; rm /run/netns/check'
  done
}

weight() { # NODES: without theirs, all pods together wait for each thread of the control plane
  local g=/sys/fs/cgroup want=$(($1 * $(nproc) * 1024)) file
  file=$g/cpu/k8s.io/cpu.shares
  [ -e $g/cgroup.controllers ] && file=$g/k8s.io/cpu.weight want=$(($1 * $(nproc) * 100))
  [ "$(cat $file)" = "$want" ] || fail "weight of the pods" "$file has $(cat $file), want $want"
  ok "weight of the pods" "$want"
}

status() { # containerd asks the chain for its STATUS: a plugin that is not available makes the node NotReady
  "$lab" node 1 sh -c 'cat > /opt/cni/bin/sick && chmod +x /opt/cni/bin/sick' << 'J'
#!/bin/sh
[ "$CNI_COMMAND" = STATUS ] || exec cat
echo '{"cniVersion":"1.1.0","code":50,"msg":"check says no"}'
exit 1
J
  conflist 's/"plugins":\[/&{"type":"sick"},/'
  k wait --for=condition=Ready=false --timeout=60s node/node1 > /dev/null
  has "STATUS makes a node NotReady" "$(k get node node1 -o jsonpath='{.status.conditions[?(@.type=="Ready")].message}')" "check says no"
  conflist 's/{"type":"sick"},//'
  k wait --for=condition=Ready --timeout=60s node/node1 > /dev/null
  ok "STATUS makes it Ready again"
}
conflist() { # SED: renames within the folder, which containerd sees; it does not see a file that is moved into it
  "$lab" node 1 sed -i "$1" /etc/cni/net.d/10-lab.conflist
}

gc() { # cnitool's GC ends every attachment of a network, so it gets one of its own
  local leases=/var/lib/cni/networks/check
  "$lab" node 1 sh -c 'mkdir /run/check && ip netns add check && cat > /run/check/check.conflist' << J
{"cniVersion":"1.1.0","name":"check","plugins":[
{"type":"bridge","bridge":"check0","ipam":{"type":"host-local","ranges":[[{"subnet":"10.203.0.0/24"}]]}}]}
J
  cnitool_ add > /dev/null
  "$lab" node 1 sh -c "ls $leases" | grep -q 10.203.0 || fail "cnitool add" "no lease"
  cnitool_ gc
  ! "$lab" node 1 sh -c "ls $leases" | grep -q 10.203.0 || fail "cnitool gc" "$("$lab" node 1 ls $leases)"
  ok "cnitool gc"
  "$lab" node 1 ip netns del check
}
cnitool_() { # VERB
  "$lab" node 1 env NETCONFPATH=/run/check CNI_PATH=/opt/cni/bin cnitool "$1" check /run/netns/check
}

images() { # a program that is linked dynamically, in an image of ours
  "$lab" load lab/check:lab "$(command -v sleep)"
  k -n check run sleeper --image=lab/check:lab --image-pull-policy=Never --restart=Never -- 1 > /dev/null
  k -n check wait --for=jsonpath='{.status.phase}'=Succeeded --timeout=60s pod/sleeper > /dev/null
  k -n check delete pod sleeper > /dev/null
  ok "an image of a dynamic program" "runs and ends"
}

restarted() { # NODE: "1true" for each pod that restarted once and is ready
  k -n check get pods --field-selector "spec.nodeName=node$1" -o jsonpath='{range .items[*]}{.status.containerStatuses[0].restartCount}{.status.containerStatuses[0].ready} {end}'
}
power_cut() { # NODE: memory gone, disk kept, all pods back
  local n=$1 before
  "$lab" node "$n" sh -c 'touch /run/memory /opt/cni/bin/disk /etc/cni/net.d/disk /var/lib/disk; cp -r /opt/cni/bin /var/lib/bin-before'
  before=$("$lab" node "$n" ls /run/netns | sort)
  SECONDS=0
  "$lab" reboot "$n"
  ok "reboot node $n" "kubelet answers after $SECONDS s"
  for _ in $(seq 300); do
    [[ $(restarted "$n") =~ ^(1true )+$ ]] && break
    sleep 0.1
  done
  [[ $(restarted "$n") =~ ^(1true )+$ ]] || fail "pods after reboot" "$(restarted "$n")"
  ok "pods after reboot" "all restarted once and ready after $SECONDS s"
  "$lab" node "$n" sh -c 'test ! -e /run/memory && test -e /opt/cni/bin/disk && test -e /etc/cni/net.d/disk && test -e /var/lib/disk && diff -r /opt/cni/bin /var/lib/bin-before' \
    || fail "memory gone, disk kept" "$("$lab" node "$n" ls /run)"
  ok "memory gone, disk kept"
  [ -z "$(comm -12 <(echo "$before") <("$lab" node "$n" ls /run/netns | sort))" ] || fail "new pod network namespaces" "$before"
  ok "new pod network namespaces"
  has "ClusterIP from node $n" "$(soon "$lab" node "$n" curl -sS -m 5 "http://$(echo_ip)/")" "pod=echo-"
  has "DNS from a pod on node $n" "$(soon app "$(first app=echo "node$n")" get http://echo/)" "pod=echo-"
}

spaces() { # the lab's network and process namespaces, as [NUMBER]
  local p
  for p in "$LAB"/pid/node*; do stat -Lc '[%i]' "/proc/$(cat "$p")/ns/pid_for_children"; done
  stat -Lc '[%i]' "/run/netns/$(basename "$LAB")"-*
}
left() { # SPACES CONTAINERS: what of them and of this lab the machine still has
  ip netns list | grep -- "^$(basename "$LAB")-" || true
  grep -F " $LAB" /proc/self/mountinfo || true
  ls -d "$LAB" 2> /dev/null || true
  find /proc/[0-9]*/ns \( -name net -o -name pid \) -printf '%p %l\n' 2> /dev/null | grep -F "$1" || true
  find /sys/fs/cgroup -type d -path '*/k8s.io/*' 2> /dev/null | grep -F "$2" || true
}
taken_down() { # NODES
  local i spaces containers
  spaces=$(spaces)
  containers=$(for i in $(seq "$1"); do "$lab" node "$i" ctr -n k8s.io containers list -q; done)
  left "$spaces" "$containers" | grep -q /k8s.io/ || fail "what is left" "not even a running lab is seen"
  SECONDS=0
  "$lab" down
  [ -z "$(left "$spaces" "$containers")" ] || fail "down leaves nothing" "$(left "$spaces" "$containers")"
  ok "down leaves nothing" "$SECONDS s"
}

nodes=$(k get nodes -o name | wc -l)
[ "$nodes" -ge 2 ] || fail "nodes" "want a lab of two or more nodes, there is $nodes"
workload
services "$nodes"
cluster
identities
separation "$nodes"
weight "$nodes"
status
gc
images
power_cut "$nodes"
k delete namespace check > /dev/null
[ "${1:-}" != down ] || taken_down "$nodes"
echo "all ok"
