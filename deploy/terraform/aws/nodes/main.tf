# How machines of a party are started: a launch template, and, if a cluster is named, a
# node group of EKS that starts with no machine. This module starts nothing.

variable "name" {
  description = "Name of the template."
  type        = string
}

variable "image" {
  description = "AMI: Debian 12, or a GPU image with NVIDIA's driver."
  type        = string
}

variable "instance_type" {
  description = "For example m7i.large, or g6.xlarge with one L4."
  type        = string
}

variable "instance_profile" {
  description = "Instance profile of the party."
  type        = string
}

variable "security_group" {
  description = "Security group of the party."
  type        = string
}

variable "disk_gb" {
  description = "Size of the disk."
  type        = number
  default     = 50
}

variable "spot" {
  description = "Whether machines are spot machines, which AWS takes back at two minutes' notice."
  type        = bool
  default     = false
}

variable "user_data" {
  description = "cloud-init's user data. It contains no secret: everyone on the machine can read it."
  type        = string
  default     = ""
}

variable "eks" {
  description = "Cluster of EKS, its nodes' role, subnets and largest number of nodes, for an optional pool."
  type = object({
    cluster   = string
    node_role = string
    subnets   = list(string)
    most      = number
  })
  default = null
}

variable "tags" {
  description = "Tags of everything, and of every machine."
  type        = map(string)
  default     = {}
}

resource "aws_launch_template" "this" {
  name                   = var.name
  image_id               = var.image
  instance_type          = var.instance_type
  update_default_version = true
  user_data              = var.user_data == "" ? null : base64encode(var.user_data)
  vpc_security_group_ids = [var.security_group]
  ebs_optimized          = true
  # A machine that stops itself costs nothing more.
  instance_initiated_shutdown_behavior = "terminate"

  iam_instance_profile {
    name = var.instance_profile
  }

  # Version 1 gives the role's credentials to every program that fetches a URL.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "enabled"
  }

  monitoring {
    enabled = true
  }

  dynamic "instance_market_options" {
    for_each = var.spot ? [1] : []
    content {
      market_type = "spot"
      spot_options {
        spot_instance_type             = "one-time"
        instance_interruption_behavior = "terminate"
      }
    }
  }

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = var.disk_gb
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume"])
    content {
      resource_type = tag_specifications.value
      tags          = merge(var.tags, { Name = var.name })
    }
  }
  tags = var.tags
}

resource "aws_eks_node_group" "this" {
  count           = var.eks == null ? 0 : 1
  cluster_name    = var.eks.cluster
  node_group_name = var.name
  node_role_arn   = var.eks.node_role
  subnet_ids      = var.eks.subnets
  ami_type        = "AL2023_x86_64_NVIDIA"
  instance_types  = [var.instance_type]
  capacity_type   = var.spot ? "SPOT" : "ON_DEMAND"
  disk_size       = var.disk_gb
  labels          = { "crossfed/party" = var.name }
  tags            = var.tags

  scaling_config {
    min_size     = 0
    desired_size = 0
    max_size     = var.eks.most
  }

  taint {
    key    = "nvidia.com/gpu"
    effect = "NO_SCHEDULE"
  }

  lifecycle {
    # The cluster's autoscaler decides.
    ignore_changes = [scaling_config[0].desired_size]
  }
}

output "launch_template" {
  description = "Id of the launch template."
  value       = aws_launch_template.this.id
}
