"""How many updates of one rollout batch each objective stands (E20). See README.md."""
