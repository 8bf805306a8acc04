package kubernetes

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/portolan-mesh/portolan/registrar/internal/model"
)

// mark is how many characters of an object's name tell sandboxes of one pod name
// apart: what people see of a container ID.
const mark = 12

// keyOf returns where the object of a record is.
func keyOf(ep model.Endpoint) types.NamespacedName {
	return types.NamespacedName{Namespace: ep.Service.Namespace, Name: objectName(ep)}
}

// objectName returns the name of a record's object: the pod's name, cut to fit, and
// the first characters of the container ID. So a pod that is made again under its
// old name has another object, and a late withdrawal of the old one cannot mean it.
// A second interface of a sandbox, and an ID that is no part of a name, is told
// apart by a hash of the UID.
func objectName(ep model.Endpoint) string {
	id := ep.ContainerID
	if len(id) < mark || ep.UID != (model.AttachmentKey{ContainerID: id, IfName: firstInterface}).String() || strings.Trim(id[:mark], "0123456789abcdef") != "" {
		sum := sha256.Sum256([]byte(ep.UID))
		id = hex.EncodeToString(sum[:])
	}
	pod := ep.PodName
	if len(pod) > validation.DNS1123SubdomainMaxLength-mark-1 {
		pod = strings.TrimRight(pod[:validation.DNS1123SubdomainMaxLength-mark-1], "-.")
	}
	if len(validation.IsDNS1123Subdomain(pod)) > 0 {
		pod = "pod" // no API server would have made a pod of this name
	}
	return pod + "-" + id[:mark]
}

// firstInterface is the interface that a runtime names first; a sandbox has
// others only by further plugins.
const firstInterface = "eth0"
