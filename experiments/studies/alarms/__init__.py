"""Do the alarms warn of collapses? Recorded runs, and what each rule says of them."""
