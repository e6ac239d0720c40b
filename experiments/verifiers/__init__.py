"""Small policies trained on environments of the package verifiers; see docs/conversations.md."""
