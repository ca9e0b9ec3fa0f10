# A bucket for large models (`exchange.url`), runs or data, with a key of its own.

variable "bucket" {
  description = "Name of the bucket."
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

variable "readers" {
  description = "ARNs of roles in other accounts that use the key; their own policies still decide what they read."
  type        = list(string)
  default     = []
}

variable "tags" {
  description = "Tags of everything."
  type        = map(string)
  default     = {}
}

data "aws_caller_identity" "here" {}

data "aws_partition" "here" {}

resource "aws_kms_key" "this" {
  description             = "Objects of ${var.bucket}"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat([
      {
        Sid       = "TheAccountsPoliciesDecide"
        Effect    = "Allow"
        Principal = { AWS = "arn:${data.aws_partition.here.partition}:iam::${data.aws_caller_identity.here.account_id}:root" }
        Action    = "kms:*"
        Resource  = "*"
      }
      ], length(var.readers) == 0 ? [] : [
      {
        Sid       = "PartiesOfOtherAccounts"
        Effect    = "Allow"
        Principal = { AWS = var.readers }
        Action    = ["kms:Decrypt", "kms:GenerateDataKey"]
        Resource  = "*"
        Condition = { StringLike = { "kms:ViaService" = "s3.*.amazonaws.com" } }
      }
    ])
  })
  tags = var.tags
}

resource "aws_kms_alias" "this" {
  name          = "alias/${replace(var.bucket, ".", "-")}"
  target_key_id = aws_kms_key.this.id
}

resource "aws_s3_bucket" "this" {
  # No versions: every round's models are deleted on purpose, and would be kept and paid.
  #checkov:skip=CKV_AWS_21:every round's models are deleted on purpose; old versions would be kept and paid for
  #checkov:skip=CKV_AWS_144:what is in transit needs no copy in another region; results are copied by their owner
  #checkov:skip=CKV_AWS_18:the events of a run count every request; access logs would say who trains when
  #checkov:skip=CKV2_AWS_62:nothing waits for events of the bucket
  bucket = var.bucket
  tags   = var.tags
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id
  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id
  rule {
    bucket_key_enabled = true
    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.this.arn
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id
  # As `python -m cloud_adapters.identity.aws_policies lifecycle` has it; a test compares.
  rule {
    id     = "RemovePartsOfUploadsThatNeverEnded"
    status = "Enabled"
    filter {
      prefix = ""
    }
    abort_incomplete_multipart_upload {
      days_after_initiation = 2
    }
  }
  rule {
    id     = "RemoveWhatRunsLeftBehind"
    status = "Enabled"
    filter {
      prefix = var.expire_prefix
    }
    expiration {
      days = var.expire_days
    }
  }
}

# As `aws_policies bucket` has it; a test compares.
resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_bucket.this.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "OnlyOverTls"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:*"
        Resource  = [aws_s3_bucket.this.arn, "${aws_s3_bucket.this.arn}/*"]
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      }
    ]
  })
  depends_on = [aws_s3_bucket_public_access_block.this]
}

output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.this.id
}

output "arn" {
  description = "ARN of the bucket."
  value       = aws_s3_bucket.this.arn
}

output "kms_key" {
  description = "ARN of its key."
  value       = aws_kms_key.this.arn
}
