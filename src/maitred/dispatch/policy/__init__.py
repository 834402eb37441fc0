"""Policies of dispatch, as pure code: credits, quotas, predictions. Times are arguments, in monotonic seconds."""
