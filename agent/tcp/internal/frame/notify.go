package frame

import "errors"

// AppendNotify sends a notification alone; control stream. The body is the message.
func AppendNotify(dst, msg []byte) []byte {
	at := len(dst)
	return finish(append(begin(dst, KindNotify), msg...), at)
}

// DecodeNotify checks the body and returns it.
func DecodeNotify(b []byte) ([]byte, error) {
	if len(b) == 0 || len(b) > MaxNotif {
		return nil, errors.New("notification without a message")
	}
	return b, nil
}
