# How machines of a party are started: an instance template, and, if a cluster is named,
# a node pool of GKE that starts with no machine. This module starts nothing.

variable "name" {
  description = "Name of the template."
  type        = string
}

variable "region" {
  description = "Region of the subnetwork."
  type        = string
}

variable "image" {
  description = "Image, for example projects/debian-cloud/global/images/family/debian-12."
  type        = string
}

variable "machine_type" {
  description = "For example n2-standard-4, or g2-standard-4 with one L4."
  type        = string
}

variable "gpu" {
  description = "Kind of GPU, for example nvidia-l4, and how many."
  type = object({
    kind  = string
    count = number
  })
  default = null
}

variable "service_account" {
  description = "E-mail of the party's service account."
  type        = string
}

variable "subnetwork" {
  description = "Id of the subnetwork."
  type        = string
}

variable "is_aggregator" {
  description = "Whether sites connect in to these machines."
  type        = bool
  default     = false
}

variable "disk_gb" {
  description = "Size of the disk."
  type        = number
  default     = 50
}

variable "spot" {
  description = "Whether machines are spot machines, which Google takes back at 30 seconds' notice."
  type        = bool
  default     = false
}

variable "most_hours" {
  description = "Hours after which Google itself deletes a machine; 0 for no limit."
  type        = number
  default     = 0
}

variable "user_data" {
  description = "cloud-init's user data. It contains no secret: everyone on the machine can read it."
  type        = string
  default     = ""
}

variable "gke" {
  description = "Cluster of GKE, its location and largest number of nodes, for an optional pool."
  type = object({
    cluster  = string
    location = string
    most     = number
  })
  default = null
}

variable "labels" {
  description = "Labels of every machine."
  type        = map(string)
  default     = {}
}

resource "google_compute_instance_template" "this" {
  #checkov:skip=CKV_GCP_32:sites have no operator of a project's keys; OS Login is on instead
  name_prefix  = "${var.name}-"
  region       = var.region
  machine_type = var.machine_type
  labels       = var.labels
  tags         = var.is_aggregator ? ["crossfed-aggregator"] : []

  disk {
    source_image = var.image
    disk_size_gb = var.disk_gb
    disk_type    = "pd-balanced"
    boot         = true
    auto_delete  = true
  }

  # No access_config: a machine without a public address.
  network_interface {
    subnetwork = var.subnetwork
  }

  service_account {
    email  = var.service_account
    scopes = ["cloud-platform"]
  }

  scheduling {
    automatic_restart   = !var.spot && var.gpu == null
    on_host_maintenance = var.spot || var.gpu != null ? "TERMINATE" : "MIGRATE"
    preemptible         = var.spot
    provisioning_model  = var.spot ? "SPOT" : "STANDARD"
    # What is deleted does not bill.
    instance_termination_action = var.spot || var.most_hours > 0 ? "DELETE" : null
    dynamic "max_run_duration" {
      for_each = var.most_hours > 0 ? [1] : []
      content {
        seconds = var.most_hours * 3600
      }
    }
  }

  dynamic "guest_accelerator" {
    for_each = var.gpu == null ? [] : [var.gpu]
    content {
      type  = guest_accelerator.value.kind
      count = guest_accelerator.value.count
    }
  }

  shielded_instance_config {
    enable_secure_boot          = true
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }

  metadata = merge(
    { enable-oslogin = "TRUE", block-project-ssh-keys = "TRUE" },
    var.user_data == "" ? {} : { user-data = var.user_data },
  )

  lifecycle {
    create_before_destroy = true
  }
}

resource "google_container_node_pool" "this" {
  #checkov:skip=CKV_GCP_68:secure boot refuses NVIDIA's driver, which GKE builds on the node
  count              = var.gke == null ? 0 : 1
  name               = var.name
  cluster            = var.gke.cluster
  location           = var.gke.location
  initial_node_count = 0

  autoscaling {
    min_node_count = 0
    max_node_count = var.gke.most
  }

  management {
    auto_repair  = true
    auto_upgrade = true
  }

  node_config {
    machine_type    = var.machine_type
    disk_size_gb    = var.disk_gb
    spot            = var.spot
    service_account = var.service_account
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    labels          = var.labels

    dynamic "guest_accelerator" {
      for_each = var.gpu == null ? [] : [var.gpu]
      content {
        type  = guest_accelerator.value.kind
        count = guest_accelerator.value.count
      }
    }

    # Pods have identities of their own, and do not see the machine's.
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
    shielded_instance_config {
      enable_integrity_monitoring = true
      enable_secure_boot          = var.gpu == null
    }
  }
}

output "instance_template" {
  description = "Id of the instance template."
  value       = google_compute_instance_template.this.id
}
