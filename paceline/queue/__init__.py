"""Between rollouter and trainer: message queue, admission, ledger."""
