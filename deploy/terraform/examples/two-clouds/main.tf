# Two clouds, one federation: an aggregator and a site in AWS, a site in Google Cloud. The
# exchange is a bucket in AWS; the site in Google Cloud reaches it by its own identity, and
# the aggregator reads shards of public data from a bucket there by its own. No key is
# made that lasts, and no machine is started.

terraform {
  required_version = ">= 1.9"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.80, < 7.0"
    }
    google = {
      source  = "hashicorp/google"
      version = ">= 6.20, < 8.0"
    }
  }
}

variable "federation" {
  description = "Name of the federation: prefix of all names, and tag of everything."
  type        = string
  default     = "crossfed"
}

variable "aws_region" {
  description = "Region in AWS."
  type        = string
  default     = "eu-central-1"
}

variable "aws_zones" {
  description = "Availability zones."
  type        = list(string)
  default     = ["eu-central-1a", "eu-central-1b"]
}

variable "aws_account" {
  description = "Account number of AWS."
  type        = string
}

variable "aws_image" {
  description = "AMI of the machines."
  type        = string
}

variable "gcp_project" {
  description = "Project of Google Cloud."
  type        = string
}

variable "gcp_project_number" {
  description = "Its number."
  type        = string
}

variable "gcp_region" {
  description = "Region in Google Cloud."
  type        = string
  default     = "europe-west3"
}

variable "billing_account" {
  description = "Billing account of Google Cloud."
  type        = string
}

variable "dollars_a_month" {
  description = "Budget of each cloud."
  type        = number
  default     = 200
}

variable "email" {
  description = "Who hears of budgets and alarms."
  type        = string
}

locals {
  tags     = { federation = var.federation }
  exchange = "${var.federation}-${var.aws_account}-exchange"
  shards   = "${var.federation}-${var.gcp_project_number}-shards"
}

provider "aws" {
  region = var.aws_region
  default_tags {
    tags = local.tags
  }
}

provider "google" {
  project = var.gcp_project
  region  = var.gcp_region
}

# AWS ------------------------------------------------------------------------------

module "aws_network" {
  source = "../../aws/network"
  name   = "${var.federation}-aws"
  zones  = var.aws_zones
}

module "exchange" {
  source        = "../../aws/exchange"
  bucket        = local.exchange
  expire_prefix = "exchange/"
}

module "aggregator" {
  source  = "../../aws/party"
  name    = "${var.federation}-aggregator"
  writes  = "${module.exchange.bucket}/exchange"
  kms_key = module.exchange.kms_key
}

module "aws_site" {
  source  = "../../aws/party"
  name    = "${var.federation}-aws-site"
  reads   = ["${module.exchange.bucket}/exchange/model"]
  writes  = "${module.exchange.bucket}/exchange/sites/aws-site"
  kms_key = module.exchange.kms_key
}

# What the site in Google Cloud is in AWS.
module "gcp_site_in_aws" {
  source          = "../../aws/party"
  name            = "${var.federation}-gcp-site"
  reads           = ["${module.exchange.bucket}/exchange/model"]
  writes          = "${module.exchange.bucket}/exchange/sites/gcp-site"
  kms_key         = module.exchange.kms_key
  trusts_machines = false
  trusts_google   = module.gcp_site.unique_id
}

module "aws_site_nodes" {
  source           = "../../aws/nodes"
  name             = "${var.federation}-aws-site"
  image            = var.aws_image
  instance_type    = "g6.xlarge"
  spot             = true
  instance_profile = module.aws_site.instance_profile
  security_group   = module.aws_network.site_security_group
  tags             = local.tags
}

module "aws_budget" {
  source          = "../../aws/budget"
  name            = var.federation
  dollars_a_month = var.dollars_a_month
  email           = var.email
  nat_gateways    = { machines = module.aws_network.nat_gateway }
}

# Google Cloud ---------------------------------------------------------------------

module "gcp_network" {
  source = "../../gcp/network"
  name   = "${var.federation}-gcp"
  region = var.gcp_region
}

module "shards" {
  source        = "../../gcp/exchange"
  bucket        = local.shards
  project       = var.gcp_project
  location      = var.gcp_region
  expire_prefix = "temporary/"
  labels        = local.tags
}

module "gcp_site" {
  source      = "../../gcp/party"
  name        = "${var.federation}-gcp-site"
  project     = var.gcp_project
  role_suffix = "gcp_site"
  reads       = ["${module.shards.bucket}/shards"]
  writes      = "${module.shards.bucket}/sites/gcp-site"
}

# What the aggregator in AWS is in Google Cloud.
module "aggregator_in_gcp" {
  source      = "../../gcp/party"
  name        = "${var.federation}-aggregator"
  project     = var.gcp_project
  role_suffix = "aggregator"
  reads       = ["${module.shards.bucket}/shards/held-out"]
  writes      = "${module.shards.bucket}/runs"
}

module "from_aws" {
  source         = "../../gcp/from_aws"
  project        = var.gcp_project
  project_number = var.gcp_project_number
  aws_account    = var.aws_account
  acts_as        = { (module.aggregator.role_name) = module.aggregator_in_gcp.name }
}

module "gcp_site_nodes" {
  source          = "../../gcp/nodes"
  name            = "${var.federation}-gcp-site"
  region          = var.gcp_region
  image           = "projects/debian-cloud/global/images/family/debian-12"
  machine_type    = "g2-standard-4"
  gpu             = { kind = "nvidia-l4", count = 1 }
  spot            = true
  most_hours      = 24
  service_account = module.gcp_site.email
  subnetwork      = module.gcp_network.subnetwork
  labels          = local.tags
}

module "gcp_budget" {
  source          = "../../gcp/budget"
  name            = var.federation
  project         = var.gcp_project
  project_number  = var.gcp_project_number
  billing_account = var.billing_account
  dollars_a_month = var.dollars_a_month
  email           = var.email
}

output "exchange_url" {
  description = "`exchange.url` of aggregator.toml and of every site.toml."
  value       = "s3://${module.exchange.bucket}/exchange"
}

output "aws_from_google" {
  description = "`credential_process` of the profile at the site in Google Cloud."
  value       = "python -m cloud_adapters.identity.aws_from_google ${module.gcp_site_in_aws.role}"
}

output "google_from_aws" {
  description = "Argument of `gcloud iam workload-identity-pools create-cred-config` for the aggregator."
  value       = module.from_aws.audience
}

# Keys of `[sites.machine]` in the deployment file, besides `type` and `market`:
# `terraform output aws_machine`.
output "aws_machine" {
  description = "Where the machine of the site in AWS is, and who."
  value = {
    region    = var.aws_region
    zones     = var.aws_zones
    subnets   = [for zone in var.aws_zones : module.aws_network.subnets[zone]]
    firewalls = [module.aws_network.site_security_group]
    identity  = module.aws_site.instance_profile
    role      = module.aws_site.role
  }
}

output "gcp_machine" {
  description = "The same of the site in Google Cloud; the network's own rules filter its traffic."
  value = {
    project  = var.gcp_project
    region   = var.gcp_region
    zones    = [for letter in ["a", "b"] : "${var.gcp_region}-${letter}"]
    subnets  = [module.gcp_network.subnetwork]
    identity = module.gcp_site.email
  }
}
