# A network of a site or an aggregator: machines without public addresses, which connect
# out through Cloud NAT. Nothing connects in, except to an aggregator's port.

variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "region" {
  description = "Region."
  type        = string
}

variable "cidr" {
  description = "Addresses of the machines."
  type        = string
  default     = "10.30.0.0/20"
}

variable "aggregator_port" {
  description = "Port of the aggregator that sites connect to; open only for machines with the tag `crossfed-aggregator`."
  type        = number
  default     = 8443
}

resource "google_compute_network" "this" {
  name                            = var.name
  auto_create_subnetworks         = false
  delete_default_routes_on_create = false
}

resource "google_compute_subnetwork" "machines" {
  #checkov:skip=CKV_GCP_76:machines have no IPv6 address, so none is to be private
  name                     = "${var.name}-machines"
  region                   = var.region
  network                  = google_compute_network.this.id
  ip_cidr_range            = var.cidr
  private_ip_google_access = true
  log_config {
    aggregation_interval = "INTERVAL_10_MIN"
    flow_sampling        = 0.5
    metadata             = "INCLUDE_ALL_METADATA"
  }
}

resource "google_compute_router" "this" {
  name    = var.name
  region  = var.region
  network = google_compute_network.this.id
}

# A fixed address, so that others can name it in their rules.
resource "google_compute_address" "nat" {
  name   = "${var.name}-nat"
  region = var.region
}

resource "google_compute_router_nat" "this" {
  name                               = var.name
  region                             = var.region
  router                             = google_compute_router.this.name
  nat_ip_allocate_option             = "MANUAL_ONLY"
  nat_ips                            = [google_compute_address.nat.self_link]
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
  log_config {
    enable = true
    filter = "ERRORS_ONLY"
  }
}

# The default says so, too; this one is seen, and logs.
resource "google_compute_firewall" "nothing_in" {
  name          = "${var.name}-nothing-in"
  network       = google_compute_network.this.name
  direction     = "INGRESS"
  priority      = 65000
  source_ranges = ["0.0.0.0/0"]
  deny {
    protocol = "all"
  }
  log_config {
    metadata = "EXCLUDE_ALL_METADATA"
  }
}

resource "google_compute_firewall" "sites_to_aggregator" {
  name          = "${var.name}-aggregator"
  network       = google_compute_network.this.name
  direction     = "INGRESS"
  priority      = 1000
  source_ranges = ["0.0.0.0/0"]
  target_tags   = ["crossfed-aggregator"]
  allow {
    protocol = "tcp"
    ports    = [tostring(var.aggregator_port)]
  }
}

resource "google_compute_firewall" "out" {
  name               = "${var.name}-out"
  network            = google_compute_network.this.name
  direction          = "EGRESS"
  priority           = 1000
  destination_ranges = ["0.0.0.0/0"]
  allow {
    protocol = "tcp"
    ports    = ["443", tostring(var.aggregator_port)]
  }
}

resource "google_compute_firewall" "nothing_else_out" {
  name               = "${var.name}-nothing-else-out"
  network            = google_compute_network.this.name
  direction          = "EGRESS"
  priority           = 65000
  destination_ranges = ["0.0.0.0/0"]
  deny {
    protocol = "all"
  }
}

output "network" {
  description = "Id of the network."
  value       = google_compute_network.this.id
}

output "subnetwork" {
  description = "Id of the subnetwork of machines."
  value       = google_compute_subnetwork.machines.id
}

output "address" {
  description = "Public address that all machines connect out from."
  value       = google_compute_address.nat.address
}
