"""Images and views: folders, lists, shards, CIFAR-10, iNaturalist; decoding and augmentation."""
