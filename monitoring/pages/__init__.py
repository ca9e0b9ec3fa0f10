"""Pages that open anywhere: report, comparison, audit, model card."""
