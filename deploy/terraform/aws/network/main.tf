# A network of a site or an aggregator: machines without public addresses, which connect
# out through one NAT gateway, and to S3 without it. Nothing connects in, except to an
# aggregator's port.

variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "cidr" {
  description = "Addresses of the network."
  type        = string
  default     = "10.20.0.0/16"
}

variable "zones" {
  description = "Availability zones with a subnet for machines; several, since a GPU may be unavailable in one."
  type        = list(string)
  validation {
    condition     = length(var.zones) > 0
    error_message = "Name at least one availability zone."
  }
}

variable "aggregator_port" {
  description = "Port of the aggregator that sites connect to."
  type        = number
  default     = 8443
}

variable "tags" {
  description = "Tags of everything."
  type        = map(string)
  default     = {}
}

data "aws_region" "here" {}

resource "aws_vpc" "this" {
  #checkov:skip=CKV2_AWS_11:flow logs are billed by the GB that a model has; an account that wants them turns them on for all networks
  cidr_block           = var.cidr
  enable_dns_hostnames = true
  enable_dns_support   = true
  tags                 = merge(var.tags, { Name = var.name })
}

# Nobody uses the default group; it lets nothing through.
resource "aws_default_security_group" "closed" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-closed" })
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = var.name })
}

resource "aws_subnet" "machines" {
  for_each                = { for index, zone in var.zones : zone => index }
  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr, 4, each.value + 1)
  map_public_ip_on_launch = false
  tags                    = merge(var.tags, { Name = "${var.name}-${each.key}" })
}

# For the NAT gateway and an aggregator's load balancer.
resource "aws_subnet" "public" {
  vpc_id                  = aws_vpc.this.id
  availability_zone       = var.zones[0]
  cidr_block              = cidrsubnet(var.cidr, 4, 0)
  map_public_ip_on_launch = false
  tags                    = merge(var.tags, { Name = "${var.name}-public" })
}

resource "aws_eip" "nat" {
  domain = "vpc"
  tags   = merge(var.tags, { Name = "${var.name}-nat" })
}

resource "aws_nat_gateway" "this" {
  allocation_id = aws_eip.nat.id
  subnet_id     = aws_subnet.public.id
  tags          = merge(var.tags, { Name = var.name })
  depends_on    = [aws_internet_gateway.this]
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-public" })
}

resource "aws_route" "public" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "public" {
  subnet_id      = aws_subnet.public.id
  route_table_id = aws_route_table.public.id
}

resource "aws_route_table" "machines" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-machines" })
}

resource "aws_route" "machines" {
  route_table_id         = aws_route_table.machines.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this.id
}

resource "aws_route_table_association" "machines" {
  for_each       = aws_subnet.machines
  subnet_id      = each.value.id
  route_table_id = aws_route_table.machines.id
}

# Models travel to S3 in the same region without the NAT gateway's price per GB.
resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${data.aws_region.here.name}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.machines.id]
  tags              = merge(var.tags, { Name = "${var.name}-s3" })
}

resource "aws_security_group" "site" {
  #checkov:skip=CKV2_AWS_5:launch templates and node groups attach it
  name        = "${var.name}-site"
  description = "A site: nothing connects in"
  vpc_id      = aws_vpc.this.id
  tags        = merge(var.tags, { Name = "${var.name}-site" })
}

resource "aws_security_group" "aggregator" {
  #checkov:skip=CKV2_AWS_5:the machine of the aggregator, started later, attaches it
  name        = "${var.name}-aggregator"
  description = "An aggregator: sites connect to one port"
  vpc_id      = aws_vpc.this.id
  tags        = merge(var.tags, { Name = "${var.name}-aggregator" })
}

resource "aws_vpc_security_group_ingress_rule" "aggregator" {
  security_group_id = aws_security_group.aggregator.id
  description       = "Sites; nginx asks each for a certificate"
  ip_protocol       = "tcp"
  from_port         = var.aggregator_port
  to_port           = var.aggregator_port
  cidr_ipv4         = "0.0.0.0/0"
}

# DNS of the VPC needs no rule.
resource "aws_vpc_security_group_egress_rule" "https" {
  for_each          = { site = aws_security_group.site.id, aggregator = aws_security_group.aggregator.id }
  security_group_id = each.value
  description       = "Stores, key services and packages"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "0.0.0.0/0"
}

resource "aws_vpc_security_group_egress_rule" "aggregator" {
  security_group_id = aws_security_group.site.id
  description       = "The aggregator"
  ip_protocol       = "tcp"
  from_port         = var.aggregator_port
  to_port           = var.aggregator_port
  cidr_ipv4         = "0.0.0.0/0"
}

output "subnets" {
  description = "Subnets for machines, by zone."
  value       = { for zone, subnet in aws_subnet.machines : zone => subnet.id }
}

output "site_security_group" {
  description = "Security group of sites."
  value       = aws_security_group.site.id
}

output "aggregator_security_group" {
  description = "Security group of an aggregator."
  value       = aws_security_group.aggregator.id
}

output "address" {
  description = "Public address that all machines connect out from."
  value       = aws_eip.nat.public_ip
}

output "nat_gateway" {
  description = "Id of the NAT gateway."
  value       = aws_nat_gateway.this.id
}
