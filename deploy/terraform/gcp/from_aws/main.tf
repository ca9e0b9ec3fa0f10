# Roles of AWS that act as service accounts here, without a key
# (docs/howto/cloud-identity.md).

variable "project" {
  description = "Project."
  type        = string
}

variable "project_number" {
  description = "Its number."
  type        = string
}

variable "pool" {
  description = "Id of the pool of identities."
  type        = string
  default     = "aws"
}

variable "aws_account" {
  description = "Account number of AWS."
  type        = string
  validation {
    condition     = can(regex("^[0-9]{12}$", var.aws_account))
    error_message = "An account of AWS has 12 digits."
  }
}

variable "acts_as" {
  description = "Which role of AWS (its name, not its ARN) acts as which service account (its full name)."
  type        = map(string)
}

resource "google_iam_workload_identity_pool" "aws" {
  project                   = var.project
  workload_identity_pool_id = var.pool
  display_name              = "AWS"
}

resource "google_iam_workload_identity_pool_provider" "aws" {
  #checkov:skip=CKV_GCP_125:it is about GitHub; this provider trusts one account of AWS, and of that the roles named
  project                            = var.project
  workload_identity_pool_id          = google_iam_workload_identity_pool.aws.workload_identity_pool_id
  workload_identity_pool_provider_id = "aws"
  display_name                       = "AWS ${var.aws_account}"
  attribute_mapping = {
    "google.subject"     = "assertion.arn"
    "attribute.aws_role" = "assertion.arn.contains('assumed-role') ? assertion.arn.extract('{account_arn}assumed-role/') + 'assumed-role/' + assertion.arn.extract('assumed-role/{role_name}/') : assertion.arn"
  }
  # No other role of that account gets a token at all.
  attribute_condition = join(" || ", [for role in sort(keys(var.acts_as)) :
    "attribute.aws_role == \"arn:aws:sts::${var.aws_account}:assumed-role/${role}\""
  ])
  aws {
    account_id = var.aws_account
  }
}

resource "google_service_account_iam_member" "role" {
  for_each           = var.acts_as
  service_account_id = each.value
  role               = "roles/iam.workloadIdentityUser"
  member             = "principalSet://iam.googleapis.com/projects/${var.project_number}/locations/global/workloadIdentityPools/${var.pool}/attribute.aws_role/arn:aws:sts::${var.aws_account}:assumed-role/${each.key}"
  depends_on         = [google_iam_workload_identity_pool_provider.aws]
}

output "audience" {
  description = "What `gcloud iam workload-identity-pools create-cred-config` is given."
  value       = "projects/${var.project_number}/locations/global/workloadIdentityPools/${var.pool}/providers/aws"
}
