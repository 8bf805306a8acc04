package kubernetes

const (
	// SignerName is the signer of workloads' certificates, in the form that
	// certificates.k8s.io demands.
	SignerName = "portolan.aether.io/workload"
	// rootsSecret holds the roots with their keys, rootsKey in it.
	rootsSecret = "portolan-ca"
	rootsKey    = "ca.pem"
	// bundleConfigMap holds the roots that everybody trusts, bundleKey in it.
	bundleConfigMap = "portolan-roots"
	bundleKey       = "roots.pem"
	// lease is who signs.
	lease = "portolan-signer"
	// extraNode is where the API server writes the node that a token is bound to.
	extraNode = "authentication.kubernetes.io/node-name"
	// fieldManager owns what we write.
	fieldManager = "portolan-signer"
	// pemRequest and pemCertificate are the types of PEM blocks.
	pemRequest     = "CERTIFICATE REQUEST"
	pemCertificate = "CERTIFICATE"
)
