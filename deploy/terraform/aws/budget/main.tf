# What a federation may cost a month in this account, and who hears of it. A budget
# warns hours later and stops nothing: nodes also stop themselves.

variable "name" {
  description = "Name of the budget; also the value of the tag `federation` that it counts."
  type        = string
}

variable "dollars_a_month" {
  description = "The budget, in US dollars."
  type        = number
  validation {
    condition     = var.dollars_a_month > 0
    error_message = "A budget is more than nothing."
  }
}

variable "email" {
  description = "Who is warned, at half, at four fifths and at all of it, and when the month is expected to exceed it."
  type        = string
}

variable "egress_gb_a_day" {
  description = "GB a day through the NAT gateway above which an alarm is raised; a model sent to another cloud costs by the GB."
  type        = number
  default     = 100
}

variable "nat_gateways" {
  description = "Ids of the NAT gateways that the alarm watches, by any name."
  type        = map(string)
  default     = {}
}

variable "tags" {
  description = "Tags of everything."
  type        = map(string)
  default     = {}
}

resource "aws_budgets_budget" "this" {
  name         = var.name
  budget_type  = "COST"
  limit_amount = format("%.2f", var.dollars_a_month)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"

  cost_filter {
    name   = "TagKeyValue"
    values = ["user:federation$${var.name}"]
  }

  dynamic "notification" {
    for_each = { half = [50, "ACTUAL"], most = [80, "ACTUAL"], all = [100, "ACTUAL"], expected = [100, "FORECASTED"] }
    content {
      comparison_operator        = "GREATER_THAN"
      threshold                  = notification.value[0]
      threshold_type             = "PERCENTAGE"
      notification_type          = notification.value[1]
      subscriber_email_addresses = [var.email]
    }
  }
  tags = var.tags
}

resource "aws_sns_topic" "alarms" {
  count             = length(var.nat_gateways) == 0 ? 0 : 1
  name              = "${var.name}-alarms"
  kms_master_key_id = "alias/aws/sns"
  tags              = var.tags
}

resource "aws_sns_topic_subscription" "email" {
  count     = length(var.nat_gateways) == 0 ? 0 : 1
  topic_arn = aws_sns_topic.alarms[0].arn
  protocol  = "email"
  endpoint  = var.email
}

resource "aws_cloudwatch_metric_alarm" "egress" {
  for_each            = var.nat_gateways
  alarm_name          = "${var.name}-egress-${each.key}"
  alarm_description   = "More than ${var.egress_gb_a_day} GB left through the NAT gateway in a day"
  namespace           = "AWS/NATGateway"
  metric_name         = "BytesOutToDestination"
  dimensions          = { NatGatewayId = each.value }
  statistic           = "Sum"
  period              = 86400
  evaluation_periods  = 1
  comparison_operator = "GreaterThanThreshold"
  threshold           = var.egress_gb_a_day * 1000000000
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_sns_topic.alarms[0].arn]
  tags                = var.tags
}
