"""From the checks before a start until every site works and the job is submitted."""
