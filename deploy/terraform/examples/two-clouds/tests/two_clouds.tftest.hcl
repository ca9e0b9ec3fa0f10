# Neither cloud is asked: `terraform test` computes what the clouds would be given.

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_region" {
    defaults = { name = "eu-central-1" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "111122223333" }
  }
  mock_resource "aws_kms_key" {
    defaults = { arn = "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab" }
  }
  mock_resource "aws_s3_bucket" {
    defaults = { arn = "arn:aws:s3:::crossfed-111122223333-exchange", id = "crossfed-111122223333-exchange" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::111122223333:role/crossfed-gcp-site" }
  }
  mock_resource "aws_sns_topic" {
    defaults = { arn = "arn:aws:sns:eu-central-1:111122223333:crossfed-alarms" }
  }
  mock_resource "aws_launch_template" {
    defaults = { id = "lt-0123456789abcdef0" }
  }
}

mock_provider "google" {
  mock_resource "google_service_account" {
    defaults = {
      unique_id = "112233445566778899000"
      email     = "crossfed-gcp-site@example-project.iam.gserviceaccount.com"
      name      = "projects/example-project/serviceAccounts/crossfed-gcp-site@example-project.iam.gserviceaccount.com"
    }
  }
}

variables {
  aws_account        = "111122223333"
  aws_image          = "ami-0123456789abcdef0"
  gcp_project        = "example-project"
  gcp_project_number = "123456789012"
  billing_account    = "012345-6789AB-CDEF01"
  email              = "operator@example.org"
}

run "both_clouds_trust_each_other" {
  assert {
    condition     = strcontains(output.aws_from_google, "arn:aws:iam::111122223333:role/")
    error_message = "the site in Google Cloud is not given a role in AWS"
  }
  assert {
    condition     = output.google_from_aws == "projects/123456789012/locations/global/workloadIdentityPools/aws/providers/aws"
    error_message = "the aggregator is not given a provider of identities"
  }
  assert {
    condition     = output.exchange_url == "s3://crossfed-111122223333-exchange/exchange"
    error_message = "the exchange's URL is wrong"
  }
  assert {
    condition     = length(output.aws_machine.subnets) == 2 && length(output.aws_machine.firewalls) == 1 && strcontains(output.aws_machine.role, ":role/")
    error_message = "the site in AWS has no network, or nobody vouches for it"
  }
  assert {
    condition     = length(output.gcp_machine.subnets) == 1 && output.gcp_machine.identity == "crossfed-gcp-site@example-project.iam.gserviceaccount.com"
    error_message = "the site in Google Cloud has no network, or nobody vouches for it"
  }
}

run "a_bucket_never_expires_as_a_whole" {
  command = plan
  module {
    source = "../../aws/exchange"
  }
  variables {
    bucket        = "whole"
    expire_prefix = ""
  }
  expect_failures = [var.expire_prefix]
}

run "a_party_gets_no_whole_bucket" {
  command = plan
  module {
    source = "../../gcp/party"
  }
  variables {
    name        = "crossfed-site"
    project     = "example-project"
    role_suffix = "site"
    writes      = "whole"
  }
  expect_failures = [var.writes]
}

run "a_party_that_nobody_can_be_is_refused" {
  command = plan
  module {
    source = "../../aws/party"
  }
  variables {
    name            = "nobody"
    writes          = "bucket/prefix"
    trusts_machines = false
  }
  expect_failures = [aws_iam_role.this]
}

run "an_address_is_no_unique_id" {
  command = plan
  module {
    source = "../../aws/party"
  }
  variables {
    name          = "reassigned"
    writes        = "bucket/prefix"
    trusts_google = "site@example-project.iam.gserviceaccount.com"
  }
  expect_failures = [var.trusts_google]
}

run "a_pool_of_eks_starts_empty" {
  command = plan
  module {
    source = "../../aws/nodes"
  }
  variables {
    name             = "gpu"
    image            = "ami-0123456789abcdef0"
    instance_type    = "g6.xlarge"
    instance_profile = "site"
    security_group   = "sg-0123456789abcdef0"
    eks              = { cluster = "one", node_role = "arn:aws:iam::111122223333:role/nodes", subnets = ["subnet-0123456789abcdef0"], most = 2 }
  }
  assert {
    condition     = aws_eks_node_group.this[0].scaling_config[0].desired_size == 0 && aws_eks_node_group.this[0].scaling_config[0].min_size == 0
    error_message = "a pool starts machines"
  }
  assert {
    condition     = aws_launch_template.this.metadata_options[0].http_tokens == "required"
    error_message = "version 1 of the metadata service is open"
  }
}

run "a_pool_of_gke_starts_empty" {
  command = plan
  module {
    source = "../../gcp/nodes"
  }
  variables {
    name            = "gpu"
    region          = "europe-west3"
    image           = "projects/debian-cloud/global/images/family/debian-12"
    machine_type    = "g2-standard-4"
    gpu             = { kind = "nvidia-l4", count = 1 }
    service_account = "site@example-project.iam.gserviceaccount.com"
    subnetwork      = "machines"
    gke             = { cluster = "one", location = "europe-west3", most = 2 }
  }
  assert {
    condition     = google_container_node_pool.this[0].initial_node_count == 0
    error_message = "a pool starts machines"
  }
}
