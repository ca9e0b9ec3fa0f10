"""Who runs a machine: words of the deployment file."""

from cloud_adapters.compute.pool import Market

LOCAL, AWS, GCP, KUBERNETES = "local", "aws", "gcp", "kubernetes"
PROVIDERS = (LOCAL, AWS, GCP, KUBERNETES)
# Their machines have prices in the table, and a cloud to vouch for them.
CLOUDS = (AWS, GCP)
MARKETS = tuple(market.value for market in Market)
