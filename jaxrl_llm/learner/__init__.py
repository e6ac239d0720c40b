"""The learner: packed rows, the train step, its compiled programs and their memory."""
