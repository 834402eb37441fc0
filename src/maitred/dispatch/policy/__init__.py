"""What dispatch decides, as pure code: credits, quotas, predictions. Times are arguments, in monotonic seconds."""
