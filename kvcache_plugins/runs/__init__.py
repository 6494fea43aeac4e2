"""What long runs share, be they evaluations, calibrations or trainings: options, records, results."""
