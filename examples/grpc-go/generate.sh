#!/bin/sh
# Writes the Go stubs into smqpb, from the contract in this repository. Needs protoc, or a program like it:
# PROTOC="python -m grpc_tools.protoc" ./generate.sh
set -e
cd "$(dirname "$0")"
mkdir -p smqpb
${PROTOC:-protoc} -I ../../smq/clients/proto/smq/v1 \
    --plugin="protoc-gen-go=$(go tool -n protoc-gen-go)" \
    --plugin="protoc-gen-go-grpc=$(go tool -n protoc-gen-go-grpc)" \
    --go_out=smqpb --go_opt=paths=source_relative,Msmq.proto=events/smqpb \
    --go-grpc_out=smqpb --go-grpc_opt=paths=source_relative,Msmq.proto=events/smqpb \
    smq.proto
