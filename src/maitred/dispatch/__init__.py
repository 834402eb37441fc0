"""The one place where requests wait: in fair order, until a replica has credits for them."""
