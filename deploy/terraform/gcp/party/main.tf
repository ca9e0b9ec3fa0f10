# What one party may do: a service account that reads the models and writes below its
# own name (a site), or does everything below the prefix (an aggregator), without a key.
# The rights are those of cloud_adapters/identity/iam; a test compares the conditions.

variable "name" {
  description = "Name of the service account, 6 to 30 characters."
  type        = string
}

variable "project" {
  description = "Project."
  type        = string
}

variable "reads" {
  description = "Prefixes `BUCKET/PREFIX` that the party reads, without a slash at their end."
  type        = list(string)
  default     = []
}

variable "writes" {
  description = "The prefix `BUCKET/PREFIX` that it writes to, and may read and clear."
  type        = string
  validation {
    condition     = can(regex("^[^/]+/.*[^/]$", var.writes))
    error_message = "Name BUCKET/PREFIX: a party gets a prefix, not a bucket."
  }
}

variable "trusts_pod" {
  description = "Pod of GKE that is the party: `NAMESPACE/SERVICE_ACCOUNT`; empty for none."
  type        = string
  default     = ""
}

variable "role_suffix" {
  description = "Ending of the names of the two roles, one pair for each party."
  type        = string
  validation {
    condition     = can(regex("^[A-Za-z0-9_]+$", var.role_suffix))
    error_message = "Letters, digits and underscores only."
  }
}

locals {
  iam   = "${path.module}/../../../../cloud_adapters/identity/iam"
  roles = { for kind in ["read", "write"] : kind => jsondecode(file("${local.iam}/gcp-${kind}.json")) }
  bindings = concat(
    [for place in var.reads : { kind = "read", place = place }],
    [{ kind = "write", place = var.writes }],
  )
  bound = { for one in local.bindings : "${one.kind} ${one.place}" => {
    kind   = one.kind
    bucket = split("/", one.place)[0]
    below  = "${join("/", slice(split("/", one.place), 1, length(split("/", one.place))))}/"
  } }
}

resource "google_service_account" "this" {
  account_id   = var.name
  project      = var.project
  display_name = "crossfed ${var.name}"
}

resource "google_project_iam_custom_role" "this" {
  for_each    = local.roles
  project     = var.project
  role_id     = "crossfed_${each.key}_${var.role_suffix}"
  title       = each.value.title
  description = each.value.description
  stage       = each.value.stage
  permissions = each.value.includedPermissions
}

resource "google_storage_bucket_iam_member" "this" {
  for_each = local.bound
  bucket   = each.value.bucket
  role     = google_project_iam_custom_role.this[each.value.kind].id
  member   = "serviceAccount:${google_service_account.this.email}"
  condition {
    title       = substr("below ${each.value.below}", 0, 100)
    description = "The objects of one prefix, and listings of it."
    expression = join(" || ", [
      "resource.name.startsWith(${jsonencode("projects/_/buckets/${each.value.bucket}/objects/${each.value.below}")})",
      "api.getAttribute(\"storage.googleapis.com/objectListPrefix\", \"\").startsWith(${jsonencode(each.value.below)})",
    ])
  }
}

resource "google_service_account_iam_member" "pod" {
  count              = var.trusts_pod == "" ? 0 : 1
  service_account_id = google_service_account.this.name
  role               = "roles/iam.workloadIdentityUser"
  member             = "serviceAccount:${var.project}.svc.id.goog[${var.trusts_pod}]"
}

output "email" {
  description = "E-mail of the service account."
  value       = google_service_account.this.email
}

output "name" {
  description = "Full name of the service account."
  value       = google_service_account.this.name
}

output "unique_id" {
  description = "Unique id, which a role of AWS trusts."
  value       = google_service_account.this.unique_id
}
