# A bucket for large models (`exchange.url`), runs or data, with a key of its own.

variable "bucket" {
  description = "Name of the bucket."
  type        = string
}

variable "project" {
  description = "Project."
  type        = string
}

variable "location" {
  description = "Region of bucket and key."
  type        = string
}

variable "expire_days" {
  description = "Days after which objects below `expire_prefix` are deleted, for runs whose aggregator never came back."
  type        = number
  default     = 14
}

variable "expire_prefix" {
  description = "Only objects below this prefix expire; results and ledgers lie elsewhere."
  type        = string
  validation {
    condition     = endswith(var.expire_prefix, "/")
    error_message = "The prefix must end with a slash: a whole bucket never expires."
  }
}

variable "labels" {
  description = "Labels of everything."
  type        = map(string)
  default     = {}
}

data "google_storage_project_service_account" "storage" {
  project = var.project
}

resource "google_kms_key_ring" "this" {
  name     = var.bucket
  project  = var.project
  location = var.location
}

resource "google_kms_crypto_key" "this" {
  #checkov:skip=CKV_GCP_82:a destroyed key can be restored for 30 days, and `terraform destroy` must be able to end what bills
  name            = "objects"
  key_ring        = google_kms_key_ring.this.id
  rotation_period = "7776000s" # 90 days.
  labels          = var.labels
  # Without the key every object is lost: for 30 days, it can be restored.
  destroy_scheduled_duration = "2592000s"
}

# Cloud Storage itself encrypts; a party needs no right on the key.
resource "google_kms_crypto_key_iam_member" "storage" {
  crypto_key_id = google_kms_crypto_key.this.id
  role          = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
  member        = "serviceAccount:${data.google_storage_project_service_account.storage.email_address}"
}

resource "google_storage_bucket" "this" {
  #checkov:skip=CKV_GCP_78:every round's models are deleted on purpose; old versions would be kept and paid for
  #checkov:skip=CKV_GCP_62:the events of a run count every request; access logs would say who trains when
  name                        = var.bucket
  project                     = var.project
  location                    = var.location
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  labels                      = var.labels

  encryption {
    default_kms_key_name = google_kms_crypto_key.this.id
  }

  # By default a deleted object is kept, and paid for, for a week.
  soft_delete_policy {
    retention_duration_seconds = 0
  }

  lifecycle_rule {
    condition {
      age = 2
    }
    action {
      type = "AbortIncompleteMultipartUpload"
    }
  }

  lifecycle_rule {
    condition {
      age            = var.expire_days
      matches_prefix = [var.expire_prefix]
    }
    action {
      type = "Delete"
    }
  }

  depends_on = [google_kms_crypto_key_iam_member.storage]
}

output "bucket" {
  description = "Name of the bucket."
  value       = google_storage_bucket.this.name
}

output "kms_key" {
  description = "Full name of its key."
  value       = google_kms_crypto_key.this.id
}
