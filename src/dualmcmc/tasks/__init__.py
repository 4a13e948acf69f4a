"""What a trained run can do: sample, reconstruct, interpolate, inpaint, detect outliers, and be measured."""
