# What one party may do: a site reads the models and writes below its own name; an
# aggregator does everything below the prefix. Who may be it: a machine, a pod of EKS,
# or a service account of Google Cloud, all without a key that lasts.

variable "name" {
  description = "Name of the role."
  type        = string
}

variable "reads" {
  description = "Prefixes `BUCKET/PREFIX` that a site reads, without a slash at their end."
  type        = list(string)
  default     = []
}

variable "writes" {
  description = "The prefix `BUCKET/PREFIX` that the party writes to, and may read and clear."
  type        = string
  validation {
    condition     = can(regex("^[^/]+/[^*?$]*[^*?$/]$", var.writes))
    error_message = "Name BUCKET/PREFIX: a party gets a prefix, not a bucket, and no pattern."
  }
}

variable "kms_key" {
  description = "ARN of the key with which S3 encrypts these places; empty for keys of S3."
  type        = string
  default     = ""
}

variable "trusts_machines" {
  description = "Whether machines with this module's instance profile are the party."
  type        = bool
  default     = true
}

variable "trusts_pod" {
  description = "Pod of EKS that is the party: ARN of the cluster's OIDC provider, its host and path, namespace and service account."
  type = object({
    provider_arn    = string
    issuer          = string
    namespace       = string
    service_account = string
  })
  default = null
}

variable "trusts_google" {
  description = "Unique id (a number) of the Google service account that is the party; empty for none."
  type        = string
  default     = ""
  validation {
    condition     = can(regex("^([0-9]{10,30})?$", var.trusts_google))
    error_message = "Give the service account's unique id, a number: an e-mail address can be assigned again."
  }
}

variable "tags" {
  description = "Tags of everything."
  type        = map(string)
  default     = {}
}

data "aws_partition" "here" {}

locals {
  arn    = "arn:${data.aws_partition.here.partition}:s3:::"
  reads  = [for place in var.reads : { bucket = split("/", place)[0], names = "${join("/", slice(split("/", place), 1, length(split("/", place))))}/*" }]
  writes = { bucket = split("/", var.writes)[0], names = "${join("/", slice(split("/", var.writes), 1, length(split("/", var.writes))))}/*" }

  # EC2 names a session by its instance, which proves a machine to an aggregator. All
  # others choose the name themselves.
  no_machine = { "sts:RoleSessionName" = "i-*" }

  trust = concat(
    !var.trusts_machines ? [] : [{
      Sid       = "Machines"
      Effect    = "Allow"
      Principal = { Service = "ec2.amazonaws.com" }
      Action    = "sts:AssumeRole"
      Condition = null
    }],
    var.trusts_pod == null ? [] : [{
      Sid       = "Pod"
      Effect    = "Allow"
      Principal = { Federated = var.trusts_pod.provider_arn }
      Action    = "sts:AssumeRoleWithWebIdentity"
      Condition = {
        StringEquals = {
          "${var.trusts_pod.issuer}:aud" = "sts.amazonaws.com"
          "${var.trusts_pod.issuer}:sub" = "system:serviceaccount:${var.trusts_pod.namespace}:${var.trusts_pod.service_account}"
        }
        StringNotLike = local.no_machine
      }
    }],
    # The token's audience is `oaud`; `aud` has the account itself. See
    # docs/howto/cloud-identity.md.
    var.trusts_google == "" ? [] : [{
      Sid       = "GoogleServiceAccount"
      Effect    = "Allow"
      Principal = { Federated = "accounts.google.com" }
      Action    = "sts:AssumeRoleWithWebIdentity"
      Condition = {
        StringEquals = {
          "accounts.google.com:sub"  = var.trusts_google
          "accounts.google.com:aud"  = var.trusts_google
          "accounts.google.com:oaud" = "sts.amazonaws.com"
        }
        StringNotLike = local.no_machine
      }
    }],
  )
}

resource "aws_iam_role" "this" {
  name                 = var.name
  max_session_duration = 3600
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [for one in local.trust : { for key, value in one : key => value if value != null }]
  })
  tags = var.tags
  lifecycle {
    precondition {
      condition     = length(local.trust) > 0
      error_message = "Nobody could be ${var.name}: set trusts_machines, trusts_pod or trusts_google."
    }
  }
}

# As `python -m cloud_adapters.identity.aws_policies site` has it; a test compares.
resource "aws_iam_role_policy" "stores" {
  name = "stores"
  role = aws_iam_role.this.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      flatten([for index, place in local.reads : [
        {
          Sid       = "ReadData${index + 1}"
          Effect    = "Allow"
          Action    = ["s3:GetObject"]
          Resource  = "${local.arn}${place.bucket}/${place.names}"
          Condition = {}
        },
        {
          Sid       = "ListData${index + 1}"
          Effect    = "Allow"
          Action    = ["s3:ListBucket"]
          Resource  = "${local.arn}${place.bucket}"
          Condition = { StringLike = { "s3:prefix" = place.names } }
        },
      ]]),
      [
        {
          Sid       = "WriteOwnPrefix"
          Effect    = "Allow"
          Action    = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
          Resource  = "${local.arn}${local.writes.bucket}/${local.writes.names}"
          Condition = {}
        },
        {
          Sid       = "ListOwnPrefix"
          Effect    = "Allow"
          Action    = ["s3:ListBucket"]
          Resource  = "${local.arn}${local.writes.bucket}"
          Condition = { StringLike = { "s3:prefix" = local.writes.names } }
        },
      ],
      var.kms_key == "" ? [] : [
        {
          Sid       = "UseTheBucketsKey"
          Effect    = "Allow"
          Action    = ["kms:Decrypt", "kms:GenerateDataKey"]
          Resource  = var.kms_key
          Condition = { StringLike = { "kms:ViaService" = "s3.*.amazonaws.com" } }
        },
      ],
    )
  })
}

resource "aws_iam_instance_profile" "this" {
  count = var.trusts_machines ? 1 : 0
  name  = var.name
  role  = aws_iam_role.this.name
  tags  = var.tags
}

output "role" {
  description = "ARN of the role."
  value       = aws_iam_role.this.arn
}

output "role_name" {
  description = "Name of the role."
  value       = aws_iam_role.this.name
}

output "instance_profile" {
  description = "Instance profile of its machines; empty if machines are not trusted."
  value       = one(aws_iam_instance_profile.this[*].name)
}
