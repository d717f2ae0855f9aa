"""What keeps the documentation true: the command reference, and pages whose examples are typed."""
