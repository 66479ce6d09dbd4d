{{/* Parts that every object has, as src/rose/deploy/pod_parts.py has them. A part takes (dict "v" .Values ...). */}}
{{- define "rose.selector" -}}
rose/instance: {{ .v.name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "rose.labels" -}}
app.kubernetes.io/name: rose
{{ include "rose.selector" . }}
{{- end }}

{{- define "rose.metadata" -}}
name: {{ .v.name }}-{{ .suffix | default .component }}
namespace: {{ .v.namespace }}
labels:
  {{- include "rose.labels" . | nindent 2 }}
{{- end }}

{{- define "rose.gateway" -}}
http://{{ .name }}-gateway.{{ .namespace }}.svc:{{ .gateway.port }}
{{- end }}

{{- define "rose.relay" -}}
{{ .relay.address | default (printf "http://%s-relay.%s.svc:%v" .name .namespace .relay.port) }}
{{- end }}

{{- define "rose.control" -}}
- name: {{ .key }}
  valueFrom: {secretKeyRef: {name: {{ .v.control_secret }}, key: {{ .key }}}}
{{- end }}

{{- define "rose.worker" -}}
- name: {{ .key }}
  valueFrom: {secretKeyRef: {name: {{ .v.worker_secret }}, key: {{ .source | default .key }}}}
{{- end }}

{{- define "rose.image" -}}
image: {{ .image.repository }}:{{ .image.tag }}
imagePullPolicy: {{ .image.pull_policy }}
{{- end }}

{{- define "rose.sealed" -}}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, readOnlyRootFilesystem: true}
{{- end }}

{{- define "rose.open" -}}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
{{- end }}

{{- define "rose.resources" -}}
resources:
  requests:
    cpu: {{ .own.cpu | quote }}
    memory: {{ .own.memory }}
    {{- if .own.gpus }}
    {{ .v.gpu_resource }}: {{ .own.gpus | quote }}
    {{- end }}
  limits:
    memory: {{ .own.memory }}
    {{- if .own.gpus }}
    {{ .v.gpu_resource }}: {{ .own.gpus | quote }}
    {{- end }}
{{- end }}

{{- define "rose.probes" -}}
startupProbe: {{ include "rose.probe" . }}failureThreshold: {{ div .within .period }}}
livenessProbe: {{ include "rose.probe" . }}failureThreshold: 6}
{{- if .served }}
readinessProbe: {{ include "rose.probe" . }}failureThreshold: 3}
{{- end }}
{{- end }}

{{- define "rose.probe" -}}
{ {{ .action }}, periodSeconds: {{ .period }}, timeoutSeconds: {{ div .period 2 }},{{ " " }}
{{- end }}

{{- define "rose.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- if .image.pull_secret }}
imagePullSecrets: [{name: {{ .image.pull_secret }}}]
{{- end }}
{{- end }}

{{- define "rose.models" -}}
- {name: models, persistentVolumeClaim: {claimName: {{ .model.claim }}, readOnly: true}}
{{- end }}

{{- define "rose.claim" -}}
accessModes: [{{ .mode | default "ReadWriteOnce" }}]
{{- if .v.storage_class }}
storageClassName: {{ .v.storage_class }}
{{- end }}
resources: {requests: {storage: {{ .own.storage }}}}
{{- end }}
