from tests.moco.classification import classify_runs

labeled, pretrained = classify_runs.labeled, classify_runs.pretrained
