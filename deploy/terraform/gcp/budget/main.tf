# What a federation may cost a month in this project, and who hears of it. A budget
# warns hours later and stops nothing: nodes also stop themselves.

variable "name" {
  description = "Name of the budget; also the value of the label `federation` that it counts."
  type        = string
}

variable "project" {
  description = "Project."
  type        = string
}

variable "project_number" {
  description = "Its number."
  type        = string
}

variable "billing_account" {
  description = "Billing account, 012345-6789AB-CDEF01."
  type        = string
}

variable "dollars_a_month" {
  description = "The budget, in US dollars; a billing account in another currency counts in that."
  type        = number
  validation {
    condition     = var.dollars_a_month >= 1
    error_message = "A budget is one dollar or more."
  }
}

variable "email" {
  description = "Who is warned, at half, at four fifths and at all of it, and when the month is expected to exceed it."
  type        = string
}

variable "egress_gb_a_day" {
  description = "GB a day through Cloud NAT above which an alarm is raised; a model sent to another cloud costs by the GB."
  type        = number
  default     = 100
}

resource "google_monitoring_notification_channel" "email" {
  project      = var.project
  display_name = var.name
  type         = "email"
  labels       = { email_address = var.email }
}

resource "google_billing_budget" "this" {
  billing_account = var.billing_account
  display_name    = var.name

  budget_filter {
    projects               = ["projects/${var.project_number}"]
    labels                 = { federation = var.name }
    credit_types_treatment = "INCLUDE_ALL_CREDITS"
  }

  amount {
    specified_amount {
      units = tostring(floor(var.dollars_a_month))
    }
  }

  dynamic "threshold_rules" {
    for_each = [0.5, 0.8, 1.0]
    content {
      threshold_percent = threshold_rules.value
      spend_basis       = "CURRENT_SPEND"
    }
  }
  threshold_rules {
    threshold_percent = 1.0
    spend_basis       = "FORECASTED_SPEND"
  }

  all_updates_rule {
    monitoring_notification_channels = [google_monitoring_notification_channel.email.id]
  }
}

resource "google_monitoring_alert_policy" "egress" {
  project      = var.project
  display_name = "${var.name}: more than ${var.egress_gb_a_day} GB a day leave"
  combiner     = "OR"
  conditions {
    display_name = "bytes through Cloud NAT"
    condition_threshold {
      filter          = "resource.type = \"nat_gateway\" AND metric.type = \"router.googleapis.com/nat/sent_bytes_count\""
      comparison      = "COMPARISON_GT"
      threshold_value = var.egress_gb_a_day * 1000000000
      duration        = "0s"
      aggregations {
        alignment_period     = "86400s"
        per_series_aligner   = "ALIGN_DELTA"
        cross_series_reducer = "REDUCE_SUM"
      }
    }
  }
  notification_channels = [google_monitoring_notification_channel.email.id]
}
