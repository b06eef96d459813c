{{/* The beginning of all names: the release's name, which smq is added to unless it says so itself. */}}
{{- define "smq.fullname" -}}
{{- $named := ternary .Release.Name (printf "%s-smq" .Release.Name) (contains "smq" .Release.Name) -}}
{{- .Values.fullnameOverride | default $named | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* What finds the pods of this release, and no others. It cannot change in the life of a StatefulSet. */}}
{{- define "smq.selector" -}}
app.kubernetes.io/name: smq
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The metadata of an object: (list $ "-suffix"). */}}
{{- define "smq.metadata" -}}
{{- $ := index . 0 -}}
name: {{ include "smq.fullname" $ }}{{ index . 1 }}
namespace: {{ $.Release.Namespace }}
labels:
  {{- include "smq.selector" $ | nindent 2 }}
  app.kubernetes.io/version: {{ $.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $.Release.Service }}
  helm.sh/chart: {{ $.Chart.Name }}-{{ $.Chart.Version }}
{{- end -}}

{{- define "smq.tlsSecret" -}}
{{ .Values.tls.secretName | default (printf "%s-tls" (include "smq.fullname" .)) }}
{{- end -}}

{{- define "smq.metricsSecret" -}}
{{ .Values.metrics.secretName | default (printf "%s-metrics" (include "smq.fullname" .)) }}
{{- end -}}

{{/* Of the nodes' certificate and of a client's. */}}
{{- define "smq.issuer" -}}
{{- if .Values.certManager.issuer.name -}}
{ kind: {{ .Values.certManager.issuer.kind }}, name: {{ .Values.certManager.issuer.name }} }
{{- else -}}
{ kind: Issuer, name: {{ include "smq.fullname" . }}-ca }
{{- end -}}
{{- end -}}
